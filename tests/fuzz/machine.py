"""A client, an operator and bad luck, all at random, against the connector under vLLM's real scheduler.

After every rule: no race, and no byte that attention read was wrong. Whenever all is served, and at the end: everything
is back where it was, and every answer is right (`FuzzRig.settle`).
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.config import CUDAGraphMode
from vllm.v1.request import RequestStatus

from layerstream.jobs import JobKind
from tests.fuzz.statistics import Statistics
from tests.rigs.fuzz_rig import OVERDUE_S, FuzzRig, Setup
from tests.rigs.scheduler_rig import BLOCK

STATISTICS = Statistics()
"""Of this process."""
MOST = 6
"""Requests at a time."""
MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE)
TROUBLES = (
    "reports are late",
    "rank is silent",
    "reports are lost",
    "mended",
    "mended",
    "all are overdue",
    "ranks stall",
    "ranks go on",
)

often = st.sampled_from((True, True, True, False))
seldom = st.sampled_from((False, False, False, True))
setups = st.builds(
    Setup,
    seed=st.integers(0, 1 << 16),
    ranks=st.integers(1, 3),
    blocks=st.integers(10, 28),
    slots=st.sampled_from((2, 4, 8, 24)),
    chunk_blocks=st.sampled_from((1, 2, 4)),
    step_tokens=st.sampled_from((24, 48, 96, 256)),
    load_mode=st.sampled_from(("layerwise", "parked")),
    path=st.sampled_from(("staged", "zero_copy", "batch_dma", "graph")),
    layers_per_gate=st.sampled_from((None, 1, 2)),
    save_decode=often,
    prefix_caching=often,
    asynchronous=st.booleans(),
    drafts=st.sampled_from((0, 0, 1, 3)),
    second_runner=st.booleans(),
    recompute=st.booleans(),
    sanitize=st.booleans(),
)


def action(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A rule that is counted, is followed by the checks, and comes only while the engine lives."""

    def make(act: Callable[..., None]) -> Any:
        @functools.wraps(act)
        def run(machine: ServingMachine, **drawn: Any) -> None:
            machine.broken = True
            act(machine, **drawn)
            machine.check()
            machine.broken = False
            STATISTICS.rules[drawn.get("what", act.__name__)] += 1

        return rule(**cast(Any, strategies))(precondition(lambda machine: not machine.rig.dead)(run))

    return make


class ServingMachine(RuleBasedStateMachine):
    """One engine from its start to its end."""

    rig: FuzzRig

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        """Whether a rule has failed, or none has begun."""
        self.prompts: list[list[int]] = []
        self.added = 0

    @initialize(setup=setups, forgets=often)
    def start(self, setup: Setup, forgets: bool) -> None:
        """
        Args:
            setup: the engine.
            forgets: whether vLLM forgets what it has cached before a request comes, so that hits are ours.
        """
        self.rig = FuzzRig(_folder(), setup)
        self.forgets = forgets
        self.broken = False
        STATISTICS.machines += 1
        for option in fields(Setup):
            if option.name not in ("seed", "blocks"):
                STATISTICS.setups[f"{option.name}={getattr(setup, option.name)}"] += 1

    @action(
        source=st.integers(0, 7),
        blocks=st.integers(0, 12),
        end=st.sampled_from((0, 0, 1, 1, BLOCK - 1, 7)),
        tail=st.integers(0, 20),
        answer=st.sampled_from((1, 1, 2, 5, 20, 50)),
        again=seldom,
    )
    def add(self, source: int, blocks: int, end: int, tail: int, answer: int, again: bool) -> None:
        """A request comes: with a new prompt, or with the head of an earlier one, of any length.

        Args:
            source: an earlier prompt; a new one if there is none of that number.
            blocks: of it to take.
            end: tokens of it to take behind them.
            tail: new tokens behind them.
            answer: tokens asked for.
            again: whether it comes under the name of a request that has ended.
        """
        if len(self.rig.scheduler.requests) >= MOST:
            return
        self.added += 1
        if source >= len(self.prompts):
            head = [2 + (self.added * 131 + i * 37 + i * i) % 900 for i in range(blocks * BLOCK + end)]
        else:
            head = self.prompts[source][: blocks * BLOCK + end]
        prompt = [*head, *(2 + (self.added * 71 + i) % 900 for i in range(tail))]
        # The longest sequence that the pool can hold, as vLLM's max_model_len sees to.
        room = (self.rig.setup.blocks - 2) * BLOCK - 2 * self.rig.setup.drafts - 2
        answer = min(answer, room // 2)
        prompt = prompt[: room - answer] or [7]
        names = [name for name in self.rig.lives if self.rig.usable(name)] if again else []
        self._serve(names[0] if names else f"r{self.added}", prompt, answer)

    @action(source=st.integers(0, 7), answer=st.sampled_from((1, 2, 20)))
    def repeat(self, source: int, answer: int) -> None:
        """A prompt comes again."""
        if source < len(self.prompts) and len(self.rig.scheduler.requests) < MOST:
            self.added += 1
            self._serve(f"r{self.added}", self.prompts[source], answer)

    @action(mode=st.sampled_from(MODES), count=st.sampled_from((1, 1, 2, 3, 8)))
    def step(self, mode: CUDAGraphMode, count: int) -> None:
        """The engine makes some steps."""
        self.rig.mode = mode
        for _ in range(count):
            if not self.rig.dead:
                self._step()

    @action(modes=st.lists(st.sampled_from(MODES), min_size=4, max_size=12))
    def steps(self, modes: list[CUDAGraphMode]) -> None:
        """The engine makes steps that run in different ways."""
        for mode in modes:
            self.rig.mode = mode
            if not self.rig.dead:
                self._step()

    @action(which=st.integers(0, MOST - 1))
    def abort(self, which: int) -> None:
        """A client goes away."""
        alive = [name for name, request in self.rig.scheduler.requests.items() if not request.is_finished()]
        if not alive:
            return
        name = alive[which % len(alive)]
        flights = self.rig.coordinator._flights._due.values()
        moving = {flight.job.kind.name for flight in flights if flight.job.request_id == name}
        status = self.rig.lives[name].request.status.name
        for what in moving or {"idle"}:
            STATISTICS.events[f"abort: {status}, {what}"] += 1
        self.rig.abort(name)

    @action(rank=st.integers(0, 2))
    def catch_up(self, rank: int) -> None:
        """A rank runs all that it was given, as far as it can."""
        rank %= self.rig.setup.ranks
        self.rig._adversaries[rank].run(self.rig.devices[rank])

    @action()
    def forget(self) -> None:
        """vLLM forgets what it has cached of requests that have ended."""
        self.rig.forget_cached()

    @action(connector=seldom, running=seldom)
    def reset(self, connector: bool, running: bool) -> None:
        """The operator resets vLLM's cache, and ours with it if `connector`."""
        self.rig.reset(connector=connector, running=running)

    @action(what=st.sampled_from(TROUBLES), rank=st.integers(0, 2), steps=st.sampled_from((0, 1, 3, 10)))
    def trouble(self, what: str, rank: int, steps: int) -> None:
        """Something goes wrong with a rank, or is mended."""
        rig, rank = self.rig, rank % self.rig.setup.ranks
        mailbox = rig.mailboxes[rank]
        match what:
            case "reports are late":
                mailbox.late = steps
            case "rank is silent":
                rig.held_back.add(rank)
            case "reports are lost":
                mailbox.losing = True
            case "mended":
                rig.held_back.discard(rank)
                mailbox.late, mailbox.losing = 0, False
            case "all are overdue":
                rig.jump(OVERDUE_S)
                self._step()
            case "ranks stall":
                rig.stalled = True
            case "ranks go on":
                rig.stalled = False

    @precondition(lambda machine: machine.added > 6)
    @action(rank=st.integers(0, 2), kind=st.sampled_from(JobKind))
    def fail(self, rank: int, kind: JobKind) -> None:
        """A rank's next job of a kind fails."""
        self.rig.mailboxes[rank % self.rig.setup.ranks].failing.add(kind)

    @action()
    def settle(self) -> None:
        """All is served, and all reports arrive."""
        self._settle()

    def check(self) -> None:
        """What must hold after every rule."""
        rig = self.rig
        assert rig.wrong == []
        assert not any(recorder.races for recorder in rig.recorders)
        index, flights = rig.coordinator._index, rig.coordinator._flights
        assert index is not None
        assert index.chunks <= index.used <= index.slots
        statuses = Counter(rig.statuses())
        STATISTICS.visit(
            (
                sorted((status, min(count, 3)) for status, count in statuses.items()),
                sorted({flight.job.kind.name for flight in flights._due.values()}),
                flights.overdue,
                4 * index.used // index.slots,
                4 * rig.free_blocks // rig.setup.blocks,
                len(rig._pending),
            )
        )

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            if not self.broken and not self.rig.dead:
                self._settle()
        finally:
            self._count()
            self.rig.close()

    def _serve(self, name: str, prompt: list[int], answer: int) -> None:
        if self.forgets:
            self.rig.forget_cached()
        self.prompts = [prompt, *self.prompts][:8]
        self.rig.add(name, prompt, max_tokens=answer)
        if name != f"r{self.added}":
            STATISTICS.events["name used again"] += 1

    def _step(self) -> None:
        STATISTICS.steps += 1
        output = self.rig.step()
        STATISTICS.events["steps in " + self.rig.mode.name] += bool(output.num_scheduled_tokens)

    def _settle(self) -> None:
        self.rig.settle()

    def _count(self) -> None:
        stats = self.rig.coordinator.take_stats()
        lives = self.rig.all_lives
        STATISTICS.faults.update(self.rig.faults)
        STATISTICS.faults["jobs given up"] += stats.expired_jobs
        STATISTICS.events.update(
            {
                "blocks loaded": stats.hit_tokens // BLOCK,
                "blocks saved": stats.saved_blocks,
                "blocks dropped": stats.dropped_blocks,
                "chunks evicted": stats.evicted_chunks,
                "preemptions": sum(life.request.num_preemptions for life in lives),
                "requests": len(lives),
                "requests failed": sum(life.request.status is RequestStatus.FINISHED_ERROR for life in lives),
                "engines stopped": int(self.rig.dead),
                "resets": self.rig.epoch,
            }
        )


@functools.cache
def _folder() -> Path:
    """For the model's config, until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="layerstream-fuzz-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
