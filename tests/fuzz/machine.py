"""A client, an operator and bad luck, all at random, against the connector under vLLM's real scheduler.

After every rule: no race, and no byte that attention read was wrong. Whenever all is served, and at the end: everything
is back where it was, and every answer is right (`FuzzRig.settle`).
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.config import CUDAGraphMode
from vllm.v1.request import RequestStatus

from layerstream.jobs import JobKind
from tests.fuzz.statistics import Statistics
from tests.rigs.fuzz_rig import OVERDUE_S, FuzzRig
from tests.rigs.fuzz_setup import Setup
from tests.rigs.installed_tiers import write_weights
from tests.rigs.scheduler_rig import BLOCK
from tests.rigs.stepped_tiers import FAULTS as TIER_FAULTS

STATISTICS = Statistics()
"""Of this process."""
MOST = 6
"""Requests at a time."""
MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE)
TROUBLES = (
    "reports are lost",
    "mended",
    "mended",
    "all are overdue",
)
OPERATIONS = (
    "rank catches up",
    "rank catches up",
    "rank falls behind",
    "vLLM forgets",
    "ranks stall",
    "ranks go on",
    "reports are late",
    "reports are late",
    "rank is silent",
    "rank speaks",
    "rank speaks",
    "reset of vLLM's cache",
    "reset of both caches",
    "reset under way",
    "new weights",
)

often = st.sampled_from((True, True, True, False))
seldom = st.sampled_from((False, False, False, True))
ranks = st.sampled_from(((1, 1), (2, 1), (3, 1), (2, 2), (3, 3), (4, 2)))
"""How many, and how many consecutive ones of them hold the same KV."""
setups = st.builds(
    lambda ranks, **others: Setup(ranks=ranks[0], replicas=ranks[1], **others),
    ranks=ranks,
    seed=st.integers(0, 1 << 16),
    blocks=st.integers(10, 28),
    slots=st.sampled_from((2, 4, 4, 8, 24)),
    chunk_blocks=st.sampled_from((1, 2, 4)),
    step_tokens=st.sampled_from((24, 48, 96, 256)),
    load_mode=st.sampled_from(("layerwise", "parked", "any", "any")),
    windows=st.sampled_from(((None,), (None,), (None,), (24,), (None, 24), (None, 16, 40), (20, None))),
    path=st.sampled_from(("staged", "zero_copy", "batch_dma", "graph")),
    layers_per_gate=st.sampled_from((None, 1, 2)),
    save_decode=often,
    prefix_caching=often,
    asynchronous=st.booleans(),
    drafts=st.sampled_from((0, 0, 1, 3)),
    second_runner=st.booleans(),
    recompute=st.booleans(),
    sanitize=st.booleans(),
    tiers=st.sampled_from((0, 1, 1, 2)),
    tails=often,
    tier_objects=st.sampled_from((None, None, 4)),
    admission=st.sampled_from(("all", "all", "all", "reused")),
).map(lambda setup: replace(setup, blocks=setup.blocks * len(setup.windows)))


def action(needs: Callable[[Any], bool] = lambda _: True, **strategies: st.SearchStrategy[Any]) -> Any:
    """A rule that is counted, after which the engine makes some steps, and which is followed by the checks.

    Args:
        needs: says of a machine whether the rule means anything now.
        strategies: of the rule's arguments.
    """

    def make(act: Callable[..., None]) -> Any:
        @functools.wraps(act)
        def run(machine: ServingMachine, mode: CUDAGraphMode, then: int, **drawn: Any) -> None:
            machine.broken = True
            machine.rig.mode = mode
            act(machine, **drawn)
            machine.steps(then)
            machine.check()
            machine.broken = False
            STATISTICS.rules[drawn.get("what", act.__name__)] += 1

        every = {"mode": st.sampled_from(MODES), "then": st.sampled_from((0, 1, 1, 2, 4))}
        decorate: Any = rule(**cast(Any, {**every, **strategies}))
        return decorate(precondition(lambda machine: not machine.rig.dead and needs(machine))(run))

    return make


def has_room(machine: ServingMachine) -> bool:
    """Whether one more request may come."""
    return len(machine.rig.scheduler.requests) < MOST


def is_busy(machine: ServingMachine) -> bool:
    """Whether a request is being served."""
    return bool(machine.alive)


def is_unlucky(machine: ServingMachine) -> bool:
    """Whether ranks and reports may fail."""
    return not machine.lucky


class ServingMachine(RuleBasedStateMachine):
    """One engine from its start to its end."""

    rig: FuzzRig
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Fields of `Setup` that are not drawn."""
    unlucky: ClassVar[bool] = False
    """Whether faults are injected into every machine."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        """Whether a rule has failed, or none has begun."""
        self.prompts: list[list[int]] = []
        self.added = 0

    @initialize(setup=setups, forgets=often, lucky=st.sampled_from((True, True, False)), resets=seldom)
    def start(self, setup: Setup, forgets: bool, lucky: bool, resets: bool) -> None:
        """
        Args:
            setup: the engine.
            forgets: whether vLLM forgets what it has cached before a request comes, so that hits are ours.
            lucky: whether nothing fails or is lost, since an engine that has seen that soon loads nothing.
            resets: whether the connector is reset though the engine has tiers, which it does not use from then on.
        """
        setup = replace(setup, **self.fixed)
        self.rig = FuzzRig(_folder(), setup)
        self.forgets, self.lucky = forgets, lucky and not self.unlucky
        self.resets = resets or not setup.tiers
        self.broken = False
        STATISTICS.machines += 1
        for option in fields(Setup):
            if option.name not in ("seed", "blocks"):
                STATISTICS.setups[f"{option.name}={getattr(setup, option.name)}"] += 1

    @property
    def alive(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name, request in self.rig.scheduler.requests.items() if not request.is_finished()]

    @action(
        has_room,
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
            source: an earlier prompt; a new one if 0.
            blocks: of it to take.
            end: tokens of it to take behind them.
            tail: new tokens behind them.
            answer: tokens asked for.
            again: whether it comes under the name of a request that has ended.
        """
        self.added += 1
        if source and self.prompts:
            head = self.prompts[source % len(self.prompts)][: blocks * BLOCK + end]
        else:
            head = self._new(blocks * BLOCK + end)
        prompt = [*head, *(2 + (self.added * 71 + i) % 900 for i in range(tail))]
        answer = min(answer, self._room // 2)
        prompt = prompt[: self._room - answer] or [7]
        names = [name for name in self.rig.lives if self.rig.usable(name)] if again else []
        self._serve(names[0] if names else f"r{self.added}", prompt, answer)

    @action(has_room, count=st.integers(2, MOST), blocks=st.integers(1, 4), answer=st.sampled_from((1, 20, 50)))
    def crowd(self, count: int, blocks: int, answer: int) -> None:
        """Requests come that want more of vLLM's pool than there is, if they are many and ask for much."""
        for number in range(count):
            if has_room(self):
                self.added += 1
                prompt = self._new(blocks * BLOCK + number)
                self._serve(f"r{self.added}", prompt, min(answer, self._room - len(prompt)))

    @action(lambda machine: has_room(machine) and machine.prompts, source=st.integers(0, 7), answer=st.integers(1, 20))
    def repeat(self, source: int, answer: int) -> None:
        """A prompt comes again."""
        self.added += 1
        self._serve(f"r{self.added}", self.prompts[source % len(self.prompts)], answer)

    @action(
        lambda machine: has_room(machine) and machine.rig.all_lives, which=st.integers(0, 7), tail=st.integers(1, 20)
    )
    def go_on(self, which: int, tail: int) -> None:
        """A conversation goes on: a prompt comes again with its answer and something new."""
        life = self.rig.all_lives[-1 - which % len(self.rig.all_lives)]
        tokens = list(life.request.all_token_ids)
        self.added += 1
        prompt = [*tokens, *(2 + (self.added * 71 + i) % 900 for i in range(tail))]
        self._serve(f"r{self.added}", prompt[: self._room - 2], 2)

    @action(is_busy, modes=st.lists(st.sampled_from(MODES), min_size=4, max_size=16))
    def serve(self, modes: list[CUDAGraphMode]) -> None:
        """The engine makes steps that run in different ways."""
        for self.rig.mode in modes:
            self.steps(1)

    @action(is_busy, which=st.integers(0, MOST - 1))
    def abort(self, which: int) -> None:
        """A client goes away."""
        self._abort(self.alive[which % len(self.alive)])

    def _abort(self, name: str) -> None:
        flights = self.rig.coordinator._flights._due.values()
        moving = {flight.job.kind.name for flight in flights if flight.job.request_id == name}
        status = self.rig.lives[name].request.status.name
        for what in moving or {"idle"}:
            STATISTICS.events[f"abort: {status}, {what}"] += 1
        self.rig.abort(name)

    @action(what=st.sampled_from(OPERATIONS), rank=st.integers(0, 3), steps=st.sampled_from((0, 1, 3, 10)))
    def operate(self, what: str, rank: int, steps: int) -> None:
        """Something that is as it should be happens at a bad moment."""
        rig, rank = self.rig, rank % self.rig.setup.ranks
        match what:
            case "rank catches up":
                rig.behind.discard(rank)
                rig._adversaries[rank].run(rig.devices[rank])
            case "rank falls behind":
                rig.behind.add(rank)
            case "vLLM forgets":
                rig.forget_cached()
            case "ranks stall" | "ranks go on":
                rig.stalled = what == "ranks stall"
            case "reports are late":
                rig.mailboxes[rank].late = steps
            case "rank is silent":
                rig.held_back.add(rank)
            case "rank speaks":
                rig.held_back.discard(rank)
            case "reset of vLLM's cache":
                rig.reset(connector=False, running=False)
            case "reset of both caches":
                rig.reset(connector=self.resets, running=False)
            case "reset under way":
                rig.reset(connector=self.resets, running=True)
            case "new weights":
                for name in self.alive:
                    self._abort(name)
                self.steps(2)
                rig.reset(connector=self.resets, running=False)

    @action(is_unlucky, what=st.sampled_from(TROUBLES), rank=st.integers(0, 3))
    def trouble(self, what: str, rank: int) -> None:
        """Something goes wrong with a rank, or is mended."""
        rig, rank = self.rig, rank % self.rig.setup.ranks
        match what:
            case "reports are lost":
                rig.mailboxes[rank].losing = True
            case "mended":
                rig.mailboxes[rank].hurry(lost=True)
            case "all are overdue":
                rig.jump(OVERDUE_S)

    @action(
        lambda machine: is_unlucky(machine) and has_room(machine) and machine.prompts,
        source=st.integers(0, 7),
        short=st.integers(0, 4 * BLOCK),
    )
    def hang(self, source: int, short: int) -> None:
        """Ranks hang while they load, until the load is given up and another request wants nearly all blocks."""
        self.rig.stalled = True
        self.rig.forget_cached()
        for prompt in (self.prompts[source % len(self.prompts)], self._new(self._room - 1 - short)):
            self.added += 1
            self._serve(f"r{self.added}", prompt, 1)
            self.steps(2)
            self.rig.jump(OVERDUE_S)
            self.steps(4)

    @action(
        lambda machine: is_unlucky(machine) and has_room(machine) and machine.added > 4,
        rank=st.integers(0, 3),
        kind=st.sampled_from((JobKind.PARKED_LOAD, JobKind.PARKED_LOAD, JobKind.LOAD, JobKind.SAVE)),
        source=st.integers(0, 7),
    )
    def fail(self, rank: int, kind: JobKind, source: int) -> None:
        """A rank's next job of a kind fails, and a prompt comes again, which may well be that job's."""
        rank %= self.rig.setup.ranks
        if kind is JobKind.SAVE:
            # Of ranks that share a pool, the first one saves.
            rank -= rank % self.rig.setup.replicas
        self.rig.mailboxes[rank].failing.add(kind)
        self.rig.forget_cached()
        self.added += 1
        self._serve(f"r{self.added}", self.prompts[source % len(self.prompts)], 2)

    @action(is_busy)
    def settle(self) -> None:
        """All is served, and all reports arrive."""
        self.rig.settle()

    @precondition(lambda machine: machine.rig.dead)
    @rule()
    def restart(self) -> None:
        """The engine has stopped; another one starts, of the same setup, with nothing in its pools."""
        self.rig.tiers.forget_debts()
        self._follow()
        STATISTICS.rules["restart"] += 1

    @action(lambda machine: machine.rig.setup.tiers and machine.prompts and has_room(machine), source=st.integers(0, 7))
    def follow(self, source: int) -> None:
        """The engine is stopped when all is served, another one follows with the same tiers; a prompt comes again."""
        self.rig.settle()
        if not self.rig.dead:
            self._follow()
            self.added += 1
            self._serve(f"r{self.added}", self.prompts[source % len(self.prompts)], 2)

    @action(
        lambda machine: is_unlucky(machine) and machine.rig.setup.tiers,
        what=st.sampled_from(TIER_FAULTS),
        which=st.integers(0, 1),
        seconds=st.sampled_from((0.0, 0.3, 3.0, 40.0)),
    )
    def tier_trouble(self, what: str, which: int, seconds: float) -> None:
        """Something goes wrong with a tier, or is mended, and time passes."""
        self.rig.tiers.trouble(which % self.rig.setup.tiers, what)
        self.rig.seconds += seconds

    def _follow(self) -> None:
        self._count()
        tiers = self.rig.tiers
        self.rig.close()
        self.rig = FuzzRig(_folder(), self.rig.setup, tiers)
        self.added = 0

    def steps(self, count: int) -> None:
        """The engine makes up to so many steps."""
        for _ in range(count):
            if not self.rig.dead:
                self.rig.step()

    def check(self) -> None:
        """What must hold after every rule."""
        rig = self.rig
        assert rig.wrong == []
        assert not any(recorder.races for recorder in rig.recorders)
        rig.check_books()
        index, flights = rig.coordinator._index, rig.coordinator._flights
        assert index is not None
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
                self.rig.settle()
        finally:
            self._count()
            self.rig.close()

    def _new(self, tokens: int) -> list[int]:
        """A prompt that nobody has sent."""
        return [2 + (self.added * 131 + i * 37 + i * i) % 900 for i in range(tokens)]

    def _serve(self, name: str, prompt: list[int], answer: int) -> None:
        if self.forgets:
            self.rig.forget_cached()
        self.prompts = [prompt, *self.prompts][:8]
        self.rig.add(name, prompt, max_tokens=answer)
        if name != f"r{self.added}":
            STATISTICS.events["name used again"] += 1

    @property
    def _room(self) -> int:
        """Tokens of the longest sequence that the pool can hold, as vLLM's max_model_len sees to."""
        setup = self.rig.setup
        return (setup.blocks - 2) // len(setup.windows) * BLOCK - 2 * setup.drafts - 2

    def _count(self) -> None:
        stats = self.rig.coordinator.take_stats()
        if self.rig.coordinator.tiering is not None:
            counts = self.rig.coordinator.tiering.take_counts()
            STATISTICS.events["blocks promoted"] += counts.promoted_blocks
            STATISTICS.events["objects not written"] += counts.dropped_objects
            STATISTICS.events["writes to tiers"] += self.rig.tiers.written()
            STATISTICS.faults["requests fell to misses"] += counts.fell_requests
        if self.rig.setup.replicas > 1:
            STATISTICS.events["blocks loaded from a shared pool"] += stats.hit_tokens // BLOCK
        lives = self.rig.all_lives
        STATISTICS.faults.update(self.rig.faults)
        STATISTICS.steps += sum(self.rig.modes.values())
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
                **{f"steps in {mode}": count for mode, count in self.rig.modes.items()},
            }
        )


@functools.cache
def _folder() -> Path:
    """For the model's config, until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="layerstream-fuzz-")
    _KEPT.append(folder)
    write_weights(Path(folder.name))
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
