"""Saves of one request that end one after another, in any order, when the request may have a new life or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from layerstream.coordinator import Coordinator
from layerstream.jobs import Job, JobKind
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

STEP = 4
"""Blocks that one step prefills."""

MakeRig = Callable[..., SchedulerRig]


def found(rig: SchedulerRig, name: str) -> int:
    """Blocks of a request's tokens that are a hit."""
    request = rig.requests[name]
    coordinator: Coordinator | None = rig.connector.scheduler._coordinator
    assert coordinator is not None
    decision = coordinator.match("asks", request.block_hashes, request.num_tokens + BLOCK, 0)
    assert decision is not None
    coordinator.finish("asks")
    return decision.tokens // BLOCK


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("running", [False, True], ids=["ended", "still running"])
def test_three_saves_of_a_request_may_end_in_any_order(
    make_rig: MakeRig, order: tuple[int, ...], running: bool
) -> None:
    rig = make_rig(step_tokens=STEP * BLOCK)
    held = HeldJobs(rig)
    rig.add("a", prompt(3 * STEP * BLOCK), max_tokens=12 if running else 1)
    for _ in range(3):
        rig.step()
    saves = held.of(JobKind.SAVE)
    assert [len(job.block_ids) for job in saves] == [STEP] * 3
    assert ("a" in rig.scheduler.requests) is running
    held.holding = False
    # Whoever gets the blocks now writes over what the saves have read.
    rig.add("other", prompt(3 * STEP * BLOCK, seed=1))
    ended: set[int] = set()
    for number in order:
        assert found(rig, "a") == STEP * next(i for i in range(4) if i not in ended)
        held.let(saves[number])
        rig.step()
        ended.add(number)
    assert found(rig, "a") == 3 * STEP
    rig.run()
    assert_idle(rig)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", prompt(3 * STEP * BLOCK)) == (3 * STEP - 1) * BLOCK


def saved(jobs: list[Job]) -> int:
    return sum(len(job.block_ids) for job in jobs)


@pytest.mark.parametrize("how", ["preempted", "aborted, and a new request of this name"])
@pytest.mark.parametrize("late", [False, True], ids=["ends first", "ends last"])
def test_a_save_of_an_earlier_life_is_not_taken_for_one_of_the_next(make_rig: MakeRig, how: str, late: bool) -> None:
    rig = make_rig(step_tokens=STEP * BLOCK)
    held = HeldJobs(rig)
    ids = prompt(3 * STEP * BLOCK)
    rig.add("a", ids, max_tokens=BLOCK + 2)
    rig.step()
    (first,) = held.of(JobKind.SAVE)
    if how == "preempted":
        rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        rig.abort("a")
        rig.add("a", ids, max_tokens=BLOCK + 2)
    for _ in range(BLOCK + 6):
        rig.step()
    assert "a" not in rig.scheduler.requests
    second = held.of(JobKind.SAVE)[1:]
    assert saved(second) == 2 * STEP + 1, "what is being saved is not saved twice"
    for jobs, blocks in ((second, 0), ([first], 3 * STEP + 1)) if late else (([first], STEP), (second, 3 * STEP + 1)):
        assert rig.scheduler.has_requests(), "the engine would stop stepping with a report due"
        held.let(*jobs)
        rig.step()
        assert found(rig, "a") == blocks
    held.holding = False
    rig.run()
    assert_idle(rig)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", ids + rig.outputs["a"][-BLOCK - 2 :]) == (3 * STEP + 1) * BLOCK
