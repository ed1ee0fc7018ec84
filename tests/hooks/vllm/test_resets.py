"""Resets of vLLM's cache and of ours, while nothing is under way and while everything is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layerstream.jobs import JobKind
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

IDS = prompt(10 * BLOCK + 3)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_a_reset_of_both_caches_leaves_no_hit_and_one_of_vllms_leaves_all_of_ours(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(options={"load_mode": mode})
    rig.serve("a", IDS)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("b", IDS) == 10 * BLOCK
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert rig.serve("c", IDS) == 0
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("d", IDS) == 10 * BLOCK
    assert_idle(rig)


# vLLM cannot preempt what is parked, and does not reset its own cache while requests run.
@pytest.mark.parametrize(("mode", "running"), [("layerwise", False), ("layerwise", True), ("parked", False)], ids=str)
@pytest.mark.parametrize("ended", [0, 1, 2], ids=["save and load", "load", "neither under way"])
def test_what_is_under_way_at_a_reset_ends_and_is_never_a_hit(
    make_rig: MakeRig, mode: str, running: bool, ended: int
) -> None:
    rig = make_rig(options={"load_mode": mode}, num_blocks=128)
    other = prompt(8 * BLOCK, seed=1)
    rig.serve("cold", IDS)
    assert rig.scheduler.reset_prefix_cache()
    held = HeldJobs(rig)
    rig.add("saves", other, max_tokens=40)
    rig.add("loads", IDS, max_tokens=40)
    for _ in range(3):
        rig.step()
    kinds = (JobKind.SAVE, JobKind.PARKED_LOAD if mode == "parked" else JobKind.LOAD)
    assert all(held.of(kind) for kind in kinds)
    for kind in kinds[:ended]:
        held.let(*held.of(kind))
        rig.step()
    left = [job for kind in kinds[ended:] for job in held.of(kind)]
    held.holding = False
    if running:
        rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    else:
        rig.connector.reset_cache()
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None and (coordinator.pool_used > 0) is bool(left), "slots stay until their users end"
    held.let(*left)
    for name in ("saves", "loads"):
        rig.abort(name)
    rig.run()
    assert coordinator.pool_used == 0
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("after", other) == 0
    assert rig.serve("after too", IDS) == 0
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", IDS) == 10 * BLOCK
    assert_idle(rig, num_blocks=128)


@pytest.mark.parametrize("computed", [7, BLOCK - 1, BLOCK + 3])
def test_what_a_running_request_computed_before_a_reset_is_not_saved_after_it(make_rig: MakeRig, computed: int) -> None:
    """A block that fills later would mix what was computed before, as with other weights, and after."""
    rig = make_rig()
    rig.add("a", IDS[:computed], max_tokens=3 * BLOCK)
    for _ in range(3):
        rig.step()
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    rig.connector.reset_cache()
    coordinator.take_stats()
    rig.run()
    assert coordinator.take_stats().saved_blocks == 0 == coordinator.pool_used
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", [*IDS[:computed], *rig.outputs["a"]]) == 0
    assert_idle(rig)
