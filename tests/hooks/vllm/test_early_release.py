"""Parked loads that are released before they have ended, under vLLM's real scheduler: whoever reads their blocks waits
for the rest, and nobody else gets them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from layerstream.coordinator import Coordinator
from layerstream.decisions import LoadMode
from layerstream.engine import StreamEngine
from layerstream.errors import RaceError, TransferError
from layerstream.flights import Flight, Flights
from layerstream.hooks.vllm.messages import StepMetadata, WorkerReport
from layerstream.hooks.vllm.scheduler import BlockPoolHolds, SchedulerHalf
from layerstream.jobs import JobKind, Report, StepPlan
from tests.hooks.vllm.test_reported_requests import Told
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.release_rig import ReleaseRig
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., Any]
IDS = prompt(10 * BLOCK + 3)


@pytest.fixture
def make(make_rig: MakeRig) -> Callable[..., ReleaseRig]:
    """Makes engines whose pool holds `IDS`, and whose vLLM has forgotten them. Loads stop before their second layer."""

    def loaded(**arguments: Any) -> ReleaseRig:
        rig: ReleaseRig = make_rig(ReleaseRig, **arguments)
        rig.serve("cold", IDS)
        rig.forget_cached()
        rig.plans.clear()
        rig.stop_before(1)
        return rig

    return loaded


def waiting(rig: SchedulerRig, name: str) -> bool:
    return rig.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS


def refs(rig: SchedulerRig, flight: Flight) -> set[int]:
    blocks = rig.scheduler.kv_cache_manager.block_pool.blocks
    return {blocks[block].ref_cnt for block in flight.job.all_block_ids}


def finish(rig: ReleaseRig, **idle: int) -> None:
    rig.go_on()
    rig.run()
    assert rig.wrong == [] and rig.loads == []
    assert [recorder.races for recorder in rig.recorders] == [[]] * len(rig.devices)
    assert_idle(rig, **idle)


@pytest.mark.parametrize("windows", [(None,), (None, 24)], ids=str)
def test_a_request_runs_once_its_layer_has_arrived_on_every_rank(
    make: Callable[..., ReleaseRig], windows: tuple[int | None, ...]
) -> None:
    rig = make(ranks=2, windows=windows, num_blocks=128)
    rig.stop_before(0, rank=1)
    rig.add("warm", IDS, max_tokens=3)
    rig.steps(6)
    assert waiting(rig, "warm"), "one rank has no layer yet"
    rig.go_on(rank=1)
    rig.steps(3)
    assert rig.outputs["warm"][:1] == rig.outputs["cold"] and rig.hits["warm"] == 10 * BLOCK
    assert len(rig.loads) == 1 and rig.behind(0) and not rig.behind(1)
    finish(rig, num_blocks=128)


@pytest.mark.parametrize("layer", [0, 1, 2, None])
def test_a_load_is_released_after_the_layer_that_was_chosen(make: Callable[..., ReleaseRig], layer: int | None) -> None:
    rig = make()
    rig.choice.release = layer
    rig.stop_before(2)
    rig.add("warm", IDS)
    rig.steps(6)
    assert waiting(rig, "warm") is (layer in (2, None))
    finish(rig)


def test_every_step_that_runs_the_model_waits_until_the_load_has_ended(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.add("warm", IDS)
    rig.steps(6)
    (load,) = rig.loads
    assert load.released and rig.requests["warm"].is_finished()
    for _ in range(2):
        rig.add("other", prompt(BLOCK, seed=5), max_tokens=2)
        rig.steps(3)
    named = [
        (bool(output.num_scheduled_tokens), output.has_sync_kv_loads, plan.released if plan is not None else ())
        for output, plan in rig.plans
    ]
    ran = [entry for entry in named[2:] if entry[0]]
    assert len(ran) >= 5 and set(ran) == {(True, True, (load.job.job_id,))}
    still = [entry for entry in named if not entry[0]]
    assert len(still) >= 3 and set(still) == {(False, False, ())}, "a step without a forward waits for nothing"
    rig.go_on()
    rig.steps(2)
    rig.add("last", prompt(BLOCK, seed=6))
    output = rig.step()
    assert output.num_scheduled_tokens and not output.has_sync_kv_loads
    finish(rig)


def test_a_load_that_is_still_parked_holds_up_nobody(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.add("decodes", prompt(BLOCK, seed=3), max_tokens=30)
    rig.step()
    rig.choice.release = None
    rig.add("warm", IDS)
    rig.steps(8)
    assert waiting(rig, "warm") and not rig.behind()
    assert not any(output.has_sync_kv_loads for output, _ in rig.plans)
    finish(rig)


def test_of_two_loads_only_the_released_one_is_waited_for(make: Callable[..., ReleaseRig]) -> None:
    rig = make(num_blocks=128)
    rig.go_on()
    other = prompt(9 * BLOCK, seed=2)
    rig.serve("cold too", other)
    rig.forget_cached()
    rig.stop_before(1)
    rig.add("released", IDS, max_tokens=20)
    rig.steps(3)
    rig.choice.release = None
    rig.add("parked", other)
    rig.steps(4)
    assert waiting(rig, "parked") and not waiting(rig, "released")
    released, parked = rig.loads
    assert rig.plans[-1][1] is not None and rig.plans[-1][1].released == (released.job.job_id,)
    assert parked.job.job_id not in rig.plans[-1][1].released
    finish(rig, num_blocks=128)


def test_a_second_request_waits_for_the_release_and_hits_locally(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.stop_before(0, 1)
    rig.add("one", IDS)
    rig.add("two", [*IDS, 5, 6, 7])
    rig.steps(4)
    assert waiting(rig, "one") and rig.requests["two"].status is RequestStatus.WAITING
    rig.go_on(stops=1)
    rig.steps(4)
    assert len(rig.loads) == 1 and rig.behind()
    assert rig.hits["one"] == rig.hits["two"] == 10 * BLOCK
    assert len(rig.choice.cases) == 1, "the second one has nothing to load"
    finish(rig)


def another_reads_what_an_aborted_request_left(rig: ReleaseRig) -> None:
    """The released request never runs, since no block is left for its last tokens."""
    rig.stop_before(0, 1)
    rig.add("hog", prompt(4 * BLOCK - 3, seed=3), max_tokens=60)
    rig.step()
    rig.add("gone", IDS)
    rig.steps(6)
    rig.go_on(stops=1)
    rig.steps(2)
    (load,) = rig.loads
    assert load.released and rig.requests["gone"].status is RequestStatus.WAITING and rig.free_blocks == 0
    rig.abort("gone")
    rig.abort("hog")
    rig.add("heir", [*IDS, 5, 6, 7], max_tokens=2)
    rig.steps(2)
    assert rig.hits["heir"] == 10 * BLOCK and "gone" not in rig.hits and len(rig.choice.cases) == 1
    finish(rig, num_blocks=16)


def test_another_request_that_hits_a_half_loaded_prefix_waits_for_the_rest(make: Callable[..., ReleaseRig]) -> None:
    another_reads_what_an_aborted_request_left(make(num_blocks=16))


@pytest.mark.parametrize("released", [False, True], ids=["parked", "released"])
def test_blocks_of_an_aborted_request_are_held_until_the_load_has_ended(
    make: Callable[..., ReleaseRig], released: bool
) -> None:
    rig = make(num_blocks=16)
    if not released:
        rig.stop_before(0)
    rig.add("gone", IDS)
    rig.steps(1 + released)
    (load,) = rig.loads
    rig.abort("gone")
    rig.steps(2)
    assert load.released is released and min(refs(rig, load)) > 0
    rig.add("next", prompt(12 * BLOCK, seed=4))
    rig.steps(3)
    assert not rig.outputs["next"], "there are too few other blocks"
    finish(rig, num_blocks=16)
    assert rig.outputs["next"]


def test_blocks_of_a_preempted_request_are_held_until_the_load_has_ended(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.add("warm", IDS, max_tokens=20)
    rig.steps(3)
    (load,) = rig.loads
    assert load.released and refs(rig, load) == {2}
    request = rig.requests["warm"]
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    assert refs(rig, load) == {1}
    rig.steps(3)
    assert request.num_preemptions == 1 and len(rig.choice.cases) == 1
    finish(rig)
    assert len(rig.outputs["warm"]) == 20


def test_a_reset_after_the_release_frees_nothing_that_is_still_written(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.add("warm", IDS, max_tokens=4)
    rig.steps(3)
    (load,) = rig.loads
    assert not rig.connector.reset_cache()
    rig.steps(4)
    assert load.released and refs(rig, load) == {1} and rig.coordinator.pool_used > 0
    finish(rig)
    assert rig.coordinator.pool_used == 0


def answer(rig: ReleaseRig, monkeypatch: pytest.MonkeyPatch, *, failed: bool) -> None:
    """Every rank says that the load has ended, whatever is true."""
    jobs = {rig.loads[0].job.job_id: len(rig.devices)}
    report = Report(failed=jobs) if failed else Report(done=jobs)
    monkeypatch.setattr(rig.workers[0], "build_connector_worker_meta", lambda: WorkerReport(report))


def test_a_load_that_fails_after_its_release_stops_the_engine(
    make: Callable[..., ReleaseRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.add("warm", IDS, max_tokens=4)
    rig.steps(3)
    answer(rig, monkeypatch, failed=True)
    with pytest.raises(TransferError, match=r"request\(s\) warm could not be loaded after their step"):
        rig.step()


def test_a_load_that_fails_on_one_rank_before_its_release_fails_its_request_alone(
    make: Callable[..., ReleaseRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    told = Told(rig)
    rig.stop_before(0)
    rig.add("warm", IDS, max_tokens=4)
    rig.steps(2)
    answer(rig, monkeypatch, failed=True)
    rig.step()
    monkeypatch.undo()
    rig.steps(3)
    assert rig.requests["warm"].status is RequestStatus.FINISHED_ERROR
    assert told.counts == {("received", "warm"): 1, ("failed", "warm"): 1}
    finish(rig)


def test_a_released_load_past_its_deadline_is_waited_for_and_not_named_again(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    told = Told(rig)
    rig.add("warm", IDS, max_tokens=40)
    rig.steps(3)
    for _ in range(3):
        rig.connector.scheduler._seconds += 100.0
        rig.step()
    (load,) = rig.loads
    assert load.overdue and rig.coordinator.overdue
    assert rig.plans[-1][1] is not None and rig.plans[-1][1].released == (load.job.job_id,)
    assert min(refs(rig, load)) == 2 and rig.behind()
    finish(rig)
    assert told.counts == {("received", "warm"): 1}
    assert len(rig.outputs["warm"]) == 40


@pytest.mark.parametrize("abort", range(7))
def test_a_released_request_is_named_once_whenever_it_is_aborted(make: Callable[..., ReleaseRig], abort: int) -> None:
    rig = make()
    told = Told(rig)
    rig.add("warm", IDS, max_tokens=9)
    for step in range(7):
        if step == abort:
            rig.abort("warm")
        if step == 4:
            rig.go_on()
        rig.step()
    finish(rig)
    assert told.counts["received", "warm"] == (abort > 0) and not told.counts["failed", "warm"]


def test_the_decision_that_counts_is_the_last_before_the_request_got_its_blocks(
    make: Callable[..., ReleaseRig],
) -> None:
    rig = make(num_blocks=16)
    rig.add("first", prompt(14 * BLOCK, seed=8), max_tokens=8)
    rig.step()
    rig.add("warm", IDS)
    rig.choice.release = None
    rig.steps(2)
    assert len(rig.choice.cases) >= 2 and not rig.loads, "it was asked and got no blocks"
    rig.choice.mode = LoadMode.LAYERWISE
    rig.go_on()
    rig.run()
    assert not any(plan is not None and job.kind is JobKind.PARKED_LOAD for _, plan in rig.plans for job in _jobs(plan))
    assert rig.hits["warm"] == 10 * BLOCK
    finish(rig, num_blocks=16)


def test_a_chooser_is_told_how_busy_the_engine_is(make: Callable[..., ReleaseRig]) -> None:
    rig = make(num_blocks=128)
    for name in ("a", "b"):
        rig.add(name, prompt(BLOCK, seed=ord(name)), max_tokens=30)
    rig.steps(2)
    rig.add("warm", IDS)
    rig.step()
    rig.add("longer", [*prompt(3, seed=1), *IDS])
    rig.add("again", IDS[: 8 * BLOCK])
    rig.step()
    (case,) = rig.choice.cases
    assert (case.found_tokens, case.local_tokens, case.num_tokens) == (10 * BLOCK, 0, len(IDS))
    assert (case.block_tokens, case.layers, case.running, case.queued_bytes) == (BLOCK, 3, 2, 0)
    assert rig.coordinator._queued_bytes == 10 * case.block_bytes > 0
    finish(rig, num_blocks=128)
    assert rig.coordinator._queued_bytes == 0


def _jobs(plan: StepPlan | None) -> tuple[Any, ...]:
    return () if plan is None else plan.jobs


# Faults.


def only_steps_of_the_request_wait(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: a step waits only if the released request is in it."""
    plan, scheduled = Coordinator.plan, set[str]()
    metadata = SchedulerHalf.step_metadata

    def listen(half: SchedulerHalf, output: SchedulerOutput) -> StepMetadata:
        scheduled.clear()
        scheduled.update(output.num_scheduled_tokens)
        return metadata(half, output)

    def forgetful(half: Coordinator, *, forward: bool = True) -> StepPlan | None:
        owners = {flight.job.request_id for flight in half._flights._released.values()}
        return plan(half, forward=forward and not scheduled.isdisjoint(owners))

    patch.setattr(SchedulerHalf, "step_metadata", listen)
    patch.setattr(Coordinator, "plan", forgetful)


def no_gates(patch: pytest.MonkeyPatch) -> None:
    """Rule 1: nobody waits for a released load."""
    patch.setattr(Flights, "released", property(lambda _: ()))


def hooks_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """The hooks wait for gated loads alone."""
    patch.setattr(StreamEngine, "_pass_released", lambda *_: None)


def a_request_reads_its_own(rig: ReleaseRig) -> None:
    rig.add("warm", IDS)
    rig.steps(6)


GATES = {
    "only steps of the request": (only_steps_of_the_request_wait, another_reads_what_an_aborted_request_left),
    "no step": (no_gates, a_request_reads_its_own),
    "no hook": (hooks_do_not_wait, a_request_reads_its_own),
}


@pytest.mark.parametrize("waits", GATES)
def test_a_gate_that_is_left_out_is_a_race_and_shows_as_wrong_bytes(
    make: Callable[..., ReleaseRig], waits: str
) -> None:
    plant, scene = GATES[waits]
    for sanitize, error, what in ((True, RaceError, "load-scatter"), (False, AssertionError, "wrong KV at tokens")):
        rig = make(num_blocks=16, options={"sanitize": sanitize})
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            with pytest.raises(error, match=what):
                scene(rig)
        rig.go_on()


def holds_end_with_the_release(rig: ReleaseRig, patch: pytest.MonkeyPatch) -> None:
    """Rule 3: what is released is not held any more."""
    release, drop = Flights.release, BlockPoolHolds.release

    def hasty(flights: Flights, report: Report) -> list[Flight]:
        released = release(flights, report)
        for flight in released:
            drop(rig.connector.scheduler._holds, flight.job.all_block_ids)
        return released

    patch.setattr(Flights, "release", hasty)
    patch.setattr(BlockPoolHolds, "release", lambda *_: None)


def another_takes_its_blocks(rig: ReleaseRig) -> None:
    rig.add("next", prompt(12 * BLOCK, seed=4), max_tokens=4)
    rig.steps(2)
    rig.go_on()
    rig.steps(3)


def test_a_hold_that_ends_with_the_release_is_a_race_and_shows_as_wrong_bytes(make: Callable[..., ReleaseRig]) -> None:
    for sanitize, error, what in ((True, RaceError, "load-scatter"), (False, AssertionError, "wrong KV at tokens")):
        rig = make(num_blocks=16, options={"sanitize": sanitize})
        with pytest.MonkeyPatch.context() as patch:
            holds_end_with_the_release(rig, patch)
            rig.add("gone", IDS)
            rig.steps(2)
            rig.abort("gone")
            with pytest.raises(error, match=what):
                another_takes_its_blocks(rig)


def test_a_gate_of_a_load_that_is_still_parked_is_seen(make: Callable[..., ReleaseRig]) -> None:
    rig = make()

    def all_of_them(flights: Flights) -> tuple[int, ...]:
        return tuple(job for job, flight in flights._due.items() if flight.job.kind is JobKind.PARKED_LOAD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flights, "released", property(all_of_them))
        with pytest.raises(AssertionError, match="behind"):
            test_a_load_that_is_still_parked_holds_up_nobody(partial(_same, rig))
    finish(rig)


def _same(rig: ReleaseRig) -> ReleaseRig:
    return rig


def test_a_step_that_is_not_told_to_load_first_is_refused(make: Callable[..., ReleaseRig]) -> None:
    rig = make()
    rig.add("warm", IDS)
    forward = rig._forward

    def late(rank: int, output: SchedulerOutput) -> Any:
        output.has_sync_kv_loads = False
        return forward(rank, output)

    rig._forward = late  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="the forward began before the loads of requests warm"):
        rig.steps(6)
    rig._forward = forward  # type: ignore[method-assign]
    rig.go_on()
