"""Ranks that hold the same KV: one of them saves, all of them load from its pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from layerstream.jobs import JobKind
from tests.rigs.books import check_tiers_idle
from tests.rigs.installed_tiers import installed, write_weights
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    write_weights(tmp_path)
    with ExitStack() as stack:

        def make(**arguments: Any) -> SchedulerRig:
            options = {"host_gib": 1 / 64, "chunk_tokens": 4 * BLOCK, "staging_mib": 1, **arguments.pop("options", {})}
            rig = SchedulerRig(tmp_path, options=options, **arguments)
            stack.callback(rig.close)
            return rig

        yield make


def settle_tiers(rig: SchedulerRig) -> None:
    """Step until the tiers have all they are to get."""
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    assert coordinator.tiering is not None
    for _ in range(1000):
        if not (coordinator.tiering._flights or coordinator.tiering.busy):
            break
        rig.step()
        time.sleep(0.001)
    check_tiers_idle(coordinator)


@pytest.mark.parametrize("load_mode", ["layerwise", "parked"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2), (3, 3)])
def test_what_one_rank_saved_is_loaded_by_all(make_rig: MakeRig, load_mode: str, ranks: int, replicas: int) -> None:
    rig = make_rig(ranks=ranks, replicas=replicas, options={"load_mode": load_mode, "verify": True})
    engines = [worker.worker.engine for worker in rig.workers]
    assert [engine is not None and engine.writes for engine in engines] == [
        rank % replicas == 0 for rank in range(ranks)
    ]
    tokens = prompt(9 * BLOCK + 5)
    assert rig.serve("cold", tokens) == 0
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", tokens, max_tokens=20) == 9 * BLOCK
    for rank, engine in enumerate(engines):
        assert engine is not None
        assert engine.verifier is not None
        compared = engine.verifier.compared
        assert compared[JobKind.LOAD] + compared[JobKind.PARKED_LOAD] == 9
        assert bool(compared[JobKind.SAVE]) is (rank % replicas == 0)


def test_nothing_is_a_hit_before_the_rank_that_saves_has_said_so(make_rig: MakeRig) -> None:
    rig = make_rig(ranks=2, replicas=2)
    rig.held_back = {0}
    rig.add("cold", prompt(4 * BLOCK + 1))
    for _ in range(20):
        rig.step()
    assert rig.connector.has_pending_push_work()
    rig.held_back = set()
    assert rig.scheduler.reset_prefix_cache()
    rig.run()
    assert rig.serve("warm", prompt(4 * BLOCK + 1)) == 4 * BLOCK


def test_a_tier_has_one_object_of_them(make_rig: MakeRig) -> None:
    tier = MemoryTier()
    tokens = prompt(8 * BLOCK + 1)
    for name, hit in (("first", 0), ("second", 8 * BLOCK)):
        with installed({"memory": tier}):
            rig = make_rig(ranks=4, replicas=2, options={"tiers": [{"type": "memory"}]})
        rig.add(name, tokens)
        rig.run()
        assert rig.hits[name] == hit
        settle_tiers(rig)
    assert [sorted(ranks) for ranks in tier.kept.values()] == [[0, 1]] * 2


def test_what_ranks_with_pools_of_their_own_kept_is_not_read_by_ranks_that_share_one(
    make_rig: MakeRig, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Object 1 of the former is the second replica's, of the latter the third rank's: other heads under one name.
    disk = {"type": "disk", "path": str(tmp_path_factory.mktemp("kv")), "gib": 1, "lookup_ms": 20_000}

    def serve(name: str) -> int:
        rig = make_rig(ranks=4, replicas=2, options={"tiers": [disk]})
        hit = rig.serve(name, prompt(8 * BLOCK + 1))
        settle_tiers(rig)
        return hit

    with monkeypatch.context() as patch:
        patch.setattr("layerstream.assembly.share_pool", lambda *_: None)
        assert serve("apart") == 0
        assert serve("apart again") == 8 * BLOCK
    assert serve("shared") == 0
    assert serve("shared again") == 8 * BLOCK
