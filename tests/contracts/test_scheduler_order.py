"""The scheduler half keeps memory apart under vLLM's real scheduler, with ranks that may be arbitrarily late: nothing
races and every byte that attention reads is right. Without a hold, a pin or a rank's answer both tests see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.errors import RaceError
from layerstream.flights import Flights
from layerstream.hooks.vllm.scheduler import BlockPoolHolds
from layerstream.index import PrefixIndex
from tests.rigs.fixed_choice import AnyChoice
from tests.rigs.late_scheduler_rig import LateSchedulerRig, traffic
from tests.rigs.scheduler_rig import BLOCK

MakeRig = Callable[..., LateSchedulerRig]

NUM_BLOCKS, TURNS = 20, 80


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    # However slow the machine is, no job is overdue but those that a test lets be.
    monkeypatch.setattr("layerstream.hooks.vllm.scheduler.time", SimpleNamespace(monotonic=lambda: 0.0))
    rigs: list[LateSchedulerRig] = []

    def make(seed: int, path: str = "staged", *, ranks: int = 1, **options: Any) -> LateSchedulerRig:
        rigs.append(
            LateSchedulerRig(
                tmp_path,
                seed=seed,
                options={
                    # Eight chunks: what is loaded was seldom there for long.
                    "host_gib": 0.00003,
                    "chunk_tokens": 2 * BLOCK,
                    "staging_mib": 1,
                    "transfer_path": "staged" if path == "graph" else path,
                    "graph_loads": path == "graph",
                    **{name: "auto" if value == "any" else value for name, value in options.items()},
                },
                num_blocks=NUM_BLOCKS,
                step_tokens=96,
                ranks=ranks,
            )
        )
        if options.get("load_mode") == "any":
            coordinator = rigs[-1].connector.scheduler._coordinator
            assert coordinator is not None
            coordinator._chooser = AnyChoice(seed)
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma", "graph"])
@pytest.mark.parametrize("seed", range(2))
def test_late_ranks_read_and_write_only_what_is_theirs(make_rig: MakeRig, path: str, mode: str, seed: int) -> None:
    rig = make_rig(seed, path, ranks=1 + seed, load_mode=mode)
    traffic(rig, seed, turns=TURNS)
    assert rig.wrong == []
    assert [recorder.races for recorder in rig.recorders] == [[]] * (1 + seed)
    assert not any(recorder.undeclared for recorder in rig.recorders)
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert rig.free_blocks == NUM_BLOCKS - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    assert coordinator.take_stats().hit_tokens > 0


@pytest.mark.parametrize(("path", "seed"), [("staged", 0), ("zero_copy", 1), ("batch_dma", 0)])
def test_requests_released_after_any_layer_read_and_write_only_what_is_theirs(
    make_rig: MakeRig, path: str, seed: int
) -> None:
    test_late_ranks_read_and_write_only_what_is_theirs(make_rig, path, "any", seed)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_the_traffic_preempts_evicts_and_aborts(make_rig: MakeRig, mode: str) -> None:
    """What the other tests rely on."""
    preempted = evicted = loaded = aborted = 0
    for seed in range(3):
        rig = make_rig(seed, "zero_copy", load_mode=mode, sanitize=False)
        traffic(rig, seed, turns=TURNS)
        stats = rig.connector.scheduler._coordinator.take_stats()
        preempted += sum(request.num_preemptions for request in rig.requests.values())
        evicted += stats.evicted_chunks
        loaded += stats.hit_tokens // BLOCK
        aborted += rig.parked_aborts
    assert preempted > 0
    assert evicted > 0
    assert loaded > 15
    assert (aborted > 0) is (mode == "parked")


def no_pins(patch: pytest.MonkeyPatch) -> None:
    """Law 3: a hit that was taken up may be evicted."""
    patch.setattr(PrefixIndex, "pin", lambda *_: None)
    patch.setattr(PrefixIndex, "unpin", lambda *_: None)


def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Law 2: a block is a hit once any rank has reported it."""
    make = Flights.__init__

    def init(flights: Flights, **arguments: Any) -> None:
        make(flights, **arguments)
        flights.world_size = 1

    patch.setattr(Flights, "__init__", init)


FAULTS = {
    "no pins": (no_pins, "parked", 1, "load-copy' reads", "save-copy' writes"),
    "one rank is enough": (one_rank_is_enough, "layerwise", 2, "save-copy' writes", "load-copy' reads"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_scheduler_half_is_named_and_shows_as_wrong_bytes(make_rig: MakeRig, name: str) -> None:
    plant, mode, ranks, first, second = FAULTS[name]
    named = wrong = False
    seeds = 0
    while not (named and wrong):
        assert seeds < 12, f"named: {named}, wrong bytes: {wrong}"
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            if not named:
                rig = make_rig(seeds, ranks=ranks, load_mode=mode)
                try:
                    traffic(rig, seeds, turns=TURNS)
                except RaceError as race:
                    named = first in str(race) and second in str(race) and "pipeline/staged.py" in str(race)
            if not wrong:
                rig = make_rig(seeds, ranks=ranks, load_mode=mode, sanitize=False)
                traffic(rig, seeds, turns=TURNS)
                wrong = bool(rig.wrong)
        seeds += 1
    for seed in range(seeds):
        rig = make_rig(seed, ranks=ranks, load_mode=mode)
        traffic(rig, seed, turns=TURNS)
        assert rig.wrong == []


def reuse_blocks_of_an_overdue_load(rig: LateSchedulerRig) -> None:
    """A parked load is given up by its deadline and its request fails; another takes all blocks that are free."""
    prompt = list(range(2, 2 + 6 * BLOCK))
    rig.serve("cold", prompt)
    rig.forget_cached()
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    rig.stalled = True
    coordinator._flights.deadline_s = 0.0
    rig.add("given up", prompt)
    for _ in range(4):
        rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    coordinator._flights.deadline_s = 1e9
    rig.add("next", range(500, 500 + 12 * BLOCK))
    for _ in range(3):
        rig.step()
    rig.stalled = False
    rig.run()


def test_blocks_of_a_load_that_was_given_up_are_held_until_it_has_ended(make_rig: MakeRig) -> None:
    """Law 4, where vLLM has freed the blocks and only the hold is left."""
    seeds = 6
    for seed in range(seeds):
        rig = make_rig(seed, load_mode="parked", host_gib=0.0001)
        reuse_blocks_of_an_overdue_load(rig)
        assert rig.wrong == []
    wrong = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPoolHolds, "hold", lambda *_: None)
        patch.setattr(BlockPoolHolds, "release", lambda *_: None)
        rig = make_rig(0, load_mode="parked", host_gib=0.0001)
        with pytest.raises(RaceError, match=r"KV of layer .*load-scatter' writes at .*the model's KV writes of layer"):
            reuse_blocks_of_an_overdue_load(rig)
        for seed in range(seeds):
            rig = make_rig(seed, load_mode="parked", host_gib=0.0001, sanitize=False)
            reuse_blocks_of_an_overdue_load(rig)
            wrong += bool(rig.wrong)
    assert wrong
