"""An engine that wakes up: ranks tell of their pools once more, and caches are registered anew where vLLM does so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.vllm.test_call_orders import OPTIONS
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SchedulerRig]:
    rig = SchedulerRig(tmp_path, options=OPTIONS, ranks=2)
    yield rig
    rig.close()


def tell_again(rig: SchedulerRig) -> None:
    shakes: dict[tuple[int, int], Any] = {}
    for rank, worker in enumerate(rig.workers):
        rig.config.parallel_config.rank = rank
        shakes[0, rank] = worker.get_handshake_metadata()
    rig.connector.set_xfer_handshake_metadata_pp_aware(shakes)


def test_what_the_pool_holds_outlives_a_second_handshake(rig: SchedulerRig) -> None:
    ids = list(range(2, 2 + 6 * BLOCK))
    rig.serve("before", ids)
    assert rig.scheduler.reset_prefix_cache()
    tell_again(rig)
    assert rig.serve("after", ids) == 5 * BLOCK
    assert rig.outputs["after"] == rig.outputs["before"]


def test_a_second_handshake_may_come_while_requests_run(rig: SchedulerRig) -> None:
    rig.add("running", range(2, 2 + 8 * BLOCK), max_tokens=2 * BLOCK)
    for _ in range(4):
        rig.step()
    tell_again(rig)
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("after", range(2, 2 + 8 * BLOCK)) == 7 * BLOCK


def test_caches_that_are_put_away_and_taken_out_again_are_loaded_into(rig: SchedulerRig) -> None:
    """vLLM's allocator maps them at the same addresses again, so what was registered stays right."""
    ids = list(range(2, 2 + 6 * BLOCK))
    rig.serve("before", ids)
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        for worker, caches in zip(rig.workers, rig.kv, strict=True):
            getattr(worker, name, lambda: None)()
            for cache in caches.values():
                cache.fill_(-1)
    assert rig.scheduler.reset_prefix_cache()
    tell_again(rig)
    assert rig.serve("after", ids) == 5 * BLOCK
    assert rig.outputs["after"] == rig.outputs["before"]
