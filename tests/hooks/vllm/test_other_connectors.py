"""Beside another connector in vLLM's MultiConnector: whose hit it is, and what of it is saved when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from layerstream.jobs import JobKind
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.books import check_books
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK, LAYERS, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

IDS = prompt(6 * BLOCK + 3)
THEIRS = 4 * BLOCK
"""Tokens that the other connector has of every prompt."""


class SlowLoader(KVConnectorBase_V1, SupportsHMA):
    """Offers a head of each prompt once, and brings its bytes when told to. Both halves at once."""

    def __init__(self, rig: SchedulerRig) -> None:
        super().__init__(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
        self.rig = rig
        self.loading: dict[str, list[int]] = {}
        """Request -> blocks that it writes."""
        self.done: set[str] = set()
        self.offers = True
        self._asked: set[str] = set()

    def bring(self, name: str) -> None:
        """The bytes are written; vLLM hears of it in the next step."""
        blocks = self.loading.pop(name)
        request = self.rig.requests[name]
        for rank in self.rig.kv:
            for layer, cache in enumerate(rank.values()):
                values = self.rig._values(request, THEIRS, layer)
                cache[blocks] = values.view(len(blocks), 1, BLOCK, 1).expand(-1, -1, -1, 4)
        self.done.add(name)

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        found = THEIRS - local if self.offers and request.request_id not in self._asked else 0
        return max(0, found), found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if external:
            stop = len(blocks.get_block_ids()[0][: THEIRS // BLOCK])
            self.loading[request.request_id] = blocks.get_block_ids()[0][stop - external // BLOCK : stop]
            self._asked.add(request.request_id)

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        done, self.done = self.done, set()
        return KVConnectorTransferResults(finished_recving=done)

    def start_load_kv(self, context: Any, **_: Any) -> None: ...

    def wait_for_layer_load(self, name: str) -> None: ...

    def save_kv_layer(self, name: str, cache: Any, metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def joined(rig: SchedulerRig, *children: KVConnectorBase_V1, role: KVConnectorRole) -> Any:
    """vLLM's MultiConnector over connectors that are there already."""
    multi = MultiConnector.__new__(MultiConnector)
    KVConnectorBase_V1.__init__(multi, rig.config, role, rig.cache)
    multi._connectors, multi._all_support_hma = list(children), True
    multi._requests_to_connector, multi._extra_async_saves = {}, {}
    return multi


@pytest.fixture(params=["ours first", "ours second"])
def both(make_rig: MakeRig, request: pytest.FixtureRequest) -> tuple[SchedulerRig, SlowLoader, HeldJobs]:
    rig: Any = make_rig(options={"load_mode": "layerwise"})
    other, jobs = SlowLoader(rig), HeldJobs(rig)
    jobs.holding = False
    order = slice(None, None, 1 if request.param == "ours first" else -1)
    rig.scheduler.connector = joined(rig, *(rig.connector, other)[order], role=KVConnectorRole.SCHEDULER)
    ours = rig.workers[0]
    rig.workers[0] = joined(rig, *(ours, other)[order], role=KVConnectorRole.WORKER)
    rig.workers[0].worker = ours.worker
    return rig, other, jobs


def saved_blocks(jobs: HeldJobs) -> list[int]:
    return [block for job in jobs.of(JobKind.SAVE) for block in job.block_ids]


def test_what_another_connector_loads_is_saved_once_it_is_there(
    both: tuple[SchedulerRig, SlowLoader, HeldJobs],
) -> None:
    rig, other, jobs = both
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    rig.add("a", IDS, max_tokens=5)
    for _ in range(4):
        rig.step()
        assert jobs.jobs == [] and coordinator.pool_used == 0
        check_books(coordinator)
    theirs = other.loading["a"]
    assert len(theirs) == THEIRS // BLOCK
    other.bring("a")
    rig.run()
    assert saved_blocks(jobs)[: len(theirs)] == theirs
    assert len(saved_blocks(jobs)) == 6 and not jobs.of(JobKind.LOAD)
    assert rig.scheduler.reset_prefix_cache()
    other.offers = False
    assert rig.serve("b", IDS) == 6 * BLOCK, "every byte of it is checked"
    assert coordinator.take_stats().hit_tokens == 6 * BLOCK
    assert_idle(rig)


def test_a_load_of_another_connector_that_nobody_wants_any_more_leaves_nothing(
    both: tuple[SchedulerRig, SlowLoader, HeldJobs],
) -> None:
    rig, other, jobs = both
    rig.add("a", IDS)
    for _ in range(3):
        rig.step()
    rig.abort("a")
    rig.step()
    assert rig.free_blocks < 63, "vLLM keeps the blocks until the load has ended"
    other.bring("a")
    rig.run()
    assert jobs.jobs == []
    assert_idle(rig)


def test_our_hit_is_not_taken_for_theirs(both: tuple[SchedulerRig, SlowLoader, HeldJobs]) -> None:
    rig, other, jobs = both
    other.offers = False
    rig.serve("cold", IDS)
    assert rig.scheduler.reset_prefix_cache()
    other.offers = True
    rig.add("warm", IDS)
    for _ in range(3):
        rig.step()
    ours_first = rig.scheduler.connector._connectors[0] is rig.connector
    assert bool(other.loading) is not ours_first
    assert bool(jobs.of(JobKind.LOAD)) is ours_first
    if other.loading:
        other.bring("warm")
    rig.run()
    assert rig.hits["warm"] == (6 * BLOCK if ours_first else THEIRS)
    assert rig.outputs["warm"] == rig.outputs["cold"] and len(rig.layers) == LAYERS
    assert_idle(rig)
