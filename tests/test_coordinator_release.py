from __future__ import annotations

import pytest

from layerstream.coordinator import Outcome
from layerstream.decisions import Decision, LoadMode
from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind, Report
from tests.rigs.fixed_choice import FixedChoice
from tests.rigs.tiering_rig import chain
from tests.test_coordinator import B, Rig

PROMPT = chain(range(4))


def parked(*, release: int | None = 1, world: int = 2) -> tuple[Rig, Job]:
    """A rig, and the load of a request that is released after a layer of eight."""
    rig = Rig(world=world)
    rig.coordinator._chooser = FixedChoice(LoadMode.PARKED, release)
    rig.coordinator.set_slots(64, layers=8, block_bytes=100)
    rig.save("cold", PROMPT)
    rig.admit("warm", PROMPT, external=4)
    return rig, rig.job()


def released(rig: Rig, job: Job, ranks: int = 1) -> Outcome:
    return rig.coordinator.report(Report(released={job.job_id: ranks}))


def waited(rig: Rig, *, forward: bool = True) -> tuple[int, ...]:
    plan = rig.coordinator.plan(forward=forward)
    return () if plan is None else plan.released


def test_a_job_says_after_which_part_of_its_layers_it_is_released() -> None:
    assert parked(release=1)[1].release_after == (2, 8)
    assert parked(release=None)[1].release_after is None


def test_a_request_is_named_once_every_rank_has_released_it() -> None:
    rig, job = parked()
    assert not released(rig, job)
    assert released(rig, job) == Outcome(received=("warm",))
    assert rig.pending() and rig.holds.held == set(job.block_ids)
    assert not rig.coordinator.report(Report(done={job.job_id: 1}))
    assert rig.holds.held == set(job.block_ids)
    assert not rig.coordinator.report(Report(done={job.job_id: 1})), "it was named before"
    assert not rig.holds.held and not rig.pending()


def test_a_rank_that_ends_the_load_counts_as_one_that_released_it() -> None:
    rig, job = parked()
    assert not rig.coordinator.report(Report(released={job.job_id: 1}, done={job.job_id: 1}))
    assert released(rig, job) == Outcome(received=("warm",))


def test_a_load_that_ends_with_its_release_is_named_once() -> None:
    rig, job = parked()
    report = Report(released={job.job_id: 2}, done={job.job_id: 2})
    assert rig.coordinator.report(report) == Outcome(received=("warm",))
    assert not rig.holds.held and waited(rig) == ()


def test_plans_name_the_released_load_in_every_step_until_the_last_rank_has_ended_it() -> None:
    rig, job = parked()
    assert waited(rig) == ()
    released(rig, job, 2)
    for _ in range(3):
        assert waited(rig) == (job.job_id,)
        assert waited(rig, forward=False) == ()
    rig.coordinator.report(Report(done={job.job_id: 1}))
    assert waited(rig) == (job.job_id,)
    rig.coordinator.report(Report(done={job.job_id: 1}))
    assert waited(rig) == () and rig.coordinator.plan() is None


def test_a_load_that_failed_on_a_rank_is_never_released() -> None:
    rig, job = parked()
    assert not rig.coordinator.report(Report(released={job.job_id: 2}, failed={job.job_id: 1}))
    assert waited(rig) == ()
    assert rig.coordinator.report(Report(done={job.job_id: 1})) == Outcome(failed=("warm",))


def test_a_failure_after_the_release_is_that_of_a_gated_load() -> None:
    rig, job = parked()
    released(rig, job, 2)
    rig.coordinator.report(Report(failed={job.job_id: 1}))
    with pytest.raises(TransferError, match=r"request\(s\) warm could not be loaded after their step"):
        rig.coordinator.report(Report(done={job.job_id: 1}))
    assert not rig.holds.held and not rig.coordinator.take_outcome()


def test_an_overdue_load_that_was_released_goes_on_being_waited_for() -> None:
    rig, job = parked()
    released(rig, job, 2)
    rig.clock.now += 100.0
    assert waited(rig) == (job.job_id,)
    assert rig.coordinator.overdue
    assert not rig.coordinator.take_outcome()
    assert rig.holds.held == set(job.block_ids)
    rig.done(job)
    assert waited(rig) == ()
    assert not rig.coordinator._flights._overdue
    assert not rig.holds.held


def test_a_release_that_comes_after_the_deadline_counts_for_nothing() -> None:
    rig, job = parked()
    rig.clock.now += 100.0
    assert waited(rig) == ()
    assert rig.coordinator.take_outcome() == Outcome(failed=("warm",))
    assert not released(rig, job, 2)
    assert waited(rig) == ()


def test_a_second_request_is_answered_once_the_first_is_released() -> None:
    rig, job = parked()
    assert rig.hit(PROMPT) is None
    released(rig, job, 2)
    assert rig.hit(PROMPT) == 4


@pytest.mark.parametrize("what", ["finish", "reset", "distrust", "admitted again"])
def test_whatever_becomes_of_the_request_its_blocks_stay_held(what: str) -> None:
    rig, job = parked()
    released(rig, job, 2)
    if what == "finish":
        rig.coordinator.finish("warm")
    elif what == "reset":
        assert not rig.coordinator.reset()
    elif what == "distrust":
        rig.coordinator.distrust(job.block_ids)
    else:
        rig.admit("warm", PROMPT, local=4)
    assert rig.holds.held == set(job.block_ids) and waited(rig) == (job.job_id,)
    index = rig.coordinator._index
    assert index is not None and index.used > 0
    rig.done(job)
    assert not rig.holds.held and waited(rig) == ()


def test_a_part_of_what_was_found_is_loaded_if_the_chooser_says_so() -> None:
    class Half(FixedChoice):
        def choose(self, case: object) -> Decision:
            return Decision(
                tokens=2 * B,
                mode=LoadMode.LAYERWISE,
                release_after_layer=None,
                reason="load_part",
                load_s=None,
                recompute_s=None,
                stall_s=None,
            )

    rig = Rig()
    rig.coordinator._chooser = Half()
    rig.save("cold", PROMPT)
    assert rig.hit(PROMPT) == 2
    rig.admit("warm", PROMPT, external=2)
    job = rig.job()
    assert job.kind is JobKind.LOAD and len(job.block_ids) == 2


def test_what_was_not_asked_about_is_not_loaded() -> None:
    rig = Rig()
    rig.save("cold", PROMPT)
    with pytest.raises(TransferError, match="nothing was decided about them; match must be asked"):
        rig.coordinator.admit(
            "warm", PROMPT, [[1, 2, 3, 4, 5]], num_tokens=65, local_tokens=0, external_tokens=4 * B,
            num_prompt_tokens=65,
        )  # fmt: skip


def test_an_answer_of_nothing_takes_back_the_one_before() -> None:
    rig = Rig()
    rig.save("cold", PROMPT)
    match = rig.coordinator.match("warm", PROMPT, 65, 0)
    assert match is not None and match.tokens == 4 * B
    nothing = rig.coordinator.match("warm", PROMPT, 65, 4 * B)
    assert nothing is not None and nothing.tokens == 0
    with pytest.raises(TransferError, match="nothing was decided about them"):
        rig.coordinator.admit(
            "warm", PROMPT, [[1, 2, 3, 4, 5]], num_tokens=65, local_tokens=0, external_tokens=4 * B,
            num_prompt_tokens=65,
        )  # fmt: skip


def test_the_queue_is_what_ranks_have_not_answered_for() -> None:
    rig, job = parked()
    assert rig.coordinator._queued_bytes == 400
    released(rig, job, 2)
    assert rig.coordinator._queued_bytes == 400
    rig.done(job)
    assert rig.coordinator._queued_bytes == 0
