"""A rig that is to bear anything, and says what is left over or wrong."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from vllm.v1.request import RequestStatus

from layerstream.jobs import JobKind
from layerstream.tiers.breaker import LONGEST_WAIT_S
from tests.rigs.books import check_books, check_tiers_idle
from tests.rigs.known_model import LANES, Life, kv_of
from tests.rigs.scheduler_rig import BLOCK, LAYERS
from tests.rigs.stepping_rig import SteppingRig

PATIENCE = 600
"""Steps in which everything that is under way must come to an end."""
OVERDUE_S = 100.0
"""Longer than any job's deadline."""
LONGEST_ILL_S = LONGEST_WAIT_S + 1.0
"""After which a tier that works is asked again."""


class FuzzRig(SteppingRig):
    """See `SteppingRig`. `settle` brings everything to an end and checks that nothing is left over."""

    @property
    def faults(self) -> Counter[str]:
        """Faults injected so far that had an effect, by kind."""
        return sum((mailbox.injected for mailbox in self.mailboxes), self.tiers.injected)

    def reset(self, *, connector: bool, running: bool) -> None:
        """vLLM's `reset_prefix_cache`. It cannot preempt what is being loaded, and says so."""
        empty = running or self._all_free()
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError:
            assert running
            assert not self._all_free()
            return
        if connector:
            self.epoch += 1
            if empty and self._all_free():
                self.floor = self.epoch

    def jump(self, seconds: float) -> None:
        """Let time pass, much more than one step may take."""
        self.connector.scheduler._seconds += seconds

    def settle(self) -> None:
        """Serve all that is left and check that everything is back where it was.

        Raises:
            AssertionError: something is stuck, left over or wrong.
        """
        self.stalled = False
        self.behind.clear()
        self.held_back.clear()
        for place in range(self.setup.tiers):
            self.tiers.mend(place)
        for mailbox in self.mailboxes:
            mailbox.hurry(lost=False)
        if not self._serve_out():
            return
        for mailbox in self.mailboxes:
            mailbox.hurry(lost=True)
        # What ranks still have to say, of jobs that were given up or of tiers, comes with the next steps, whatever
        # their cause. An ill tier is well again after a while.
        for _ in range(6):
            self.run_devices()
            self.jump(1.0)
            self.seconds += LONGEST_ILL_S
            self.step()
            # What waited for a tier that was ill is written then, before the engine stops stepping.
            for _ in range(PATIENCE):
                if not self.connector.has_pending_push_work():
                    break
                self.run_devices()
                self.step()
        while self._pending:
            self._book()
        self.run_devices()
        self._check_idle()

    def _serve_out(self) -> bool:
        """Step until nothing is left to serve and no report is due; False if the engine stopped at a failure."""
        steps = 0
        while True:
            if self.idle:
                # What was under way may make a report due again: a tier that is well once more gets what waited.
                self.run_devices()
                if self.idle:
                    return True
            steps += 1
            assert steps < PATIENCE, f"still busy after {steps} steps: {self.statuses()}"
            self._pass_time(steps)
            if self.scheduler.has_requests():
                self.step()
            else:
                self._book()
            if self.dead:
                return False

    def _pass_time(self, steps: int) -> None:
        """Ranks catch up now and then, and seconds pass for those who wait by the clock."""
        if steps % 4 == 0:
            self.run_devices()
        if steps % 25 == 0 and self.setup.tiers:
            self.seconds += 1.0
        if steps % 50 == 0 and any(mailbox.lost for mailbox in self.mailboxes):
            self.jump(OVERDUE_S)
        if steps % 100 == 0:
            self._drop_reservations()

    def _drop_reservations(self) -> None:
        """vLLM keeps the blocks reserved that a request needed whose load has failed and which is to be computed anew,
        though it has given all of them back; others that want to load may wait for these for ever."""
        for request in list(self.scheduler._inflight_prefills):
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if waits and not request.num_computed_tokens:
                self.scheduler._inflight_prefills.discard(request)

    def statuses(self) -> list[str]:
        """Of all requests that the engine knows."""
        return sorted(request.status.name for request in self.scheduler.requests.values())

    def check_books(self) -> None:
        """What is under way has what it needs and no more: slots, blocks that are held, pins, and writers."""
        flights = self.coordinator._flights
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for flight in (*flights._due.values(), *flights._overdue.values()):
            if flight.job.kind is JobKind.PARKED_LOAD:
                assert all(blocks[block].ref_cnt for block in flight.job.all_block_ids), (
                    "a block being loaded is not held"
                )
        check_books(self.coordinator)

    def _all_free(self) -> bool:
        return self.free_blocks == self.setup.blocks - 1

    def _check_idle(self) -> None:
        coordinator, half = self.coordinator, self.connector.scheduler
        index, flights = coordinator._index, coordinator._flights
        assert index is not None
        assert self.wrong == []
        assert not self.scheduler.requests
        assert self._all_free(), f"{self.setup.blocks - 1 - self.free_blocks} blocks of vLLM's pool are left over"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not (half.pending() or flights._due or flights._overdue or flights._outbox or flights._released)
        assert not (coordinator._decisions or coordinator._queued_bytes)
        assert not (coordinator._requests or half._requests or half._asked or coordinator._arriving or half._failed)
        self.check_books()
        check_tiers_idle(coordinator)
        for tier in self.tiers.tiers:
            assert not tier.inner.owed, "a ticket or a reservation was not handed back"
            assert not tier.inner.overpaid, "a ticket or a reservation was handed back twice"
        assert not any(engine._ledger._in_flight for engine in self.engines)
        assert all(device.close(0.0) for device in self.devices), "a stream waits for what will not come"
        assert not any(recorder.undeclared for recorder in self.recorders)
        for life in self.all_lives:
            self._check_answer(life)
        self._check_pools()

    def _check_pools(self) -> None:
        """Every block that would be a hit has the right bytes in the pool of every rank."""
        index = self.coordinator._index
        assert index is not None
        known = {
            hashed: (life, block) for life in self.all_lives for block, hashed in enumerate(life.request.block_hashes)
        }
        # In layers with a window a page may have no bytes: it had passed the block.
        layers = [layer for layer in range(LAYERS) if self.windows[self.group_of(layer)] is None]
        for chunk in index._heads.values():
            for place, hashed in enumerate(chunk.hashes[: chunk.ready]):
                life, block = known[hashed]
                numbers = torch.tensor(life.numbers((block + 1) * BLOCK, ())[-BLOCK:])
                page = chunk.slot * index.chunk_blocks + place
                for (rank, engine), layer in itertools.product(enumerate(self.engines), layers):
                    have = engine.pool.span(layer, page, 1).view(torch.int64).view(BLOCK, LANES)
                    assert torch.equal(have[:, :-1], kv_of(numbers, layer)), f"rank {rank}: wrong bytes in page {page}"
                    assert (have[:, -1] >= self.floor).all(), f"rank {rank}: page {page} is from before a reset"

    def _check_answer(self, life: Life) -> None:
        request = life.request
        assert request.is_finished(), f"request {request.request_id} is {request.status.name}"
        tokens = list(request.all_token_ids)
        assert tokens == [life.token(position) for position in range(len(tokens))]
        if request.status is RequestStatus.FINISHED_ERROR:
            assert not self.setup.recompute
            assert self.faults or self.coordinator._stats.expired_jobs, "a request failed and nothing was wrong"
        elif not life.aborted:
            assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
