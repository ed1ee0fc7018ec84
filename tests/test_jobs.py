"""What crosses processes arrives as it left, and reports of ranks add up."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.jobs import Job, JobKind, RankInfo, Report, StepPlan
from layerstream.measured import Measured
from layerstream.metrics import LoadTimes, TierTraffic, TransferStats


def job(kind: JobKind, job_id: int = 7) -> Job:
    return Job(job_id=job_id, kind=kind, request_id="request-7", block_ids=(5, 3, 9), pool_runs=((16, 2), (40, 1)))


MESSAGES: dict[str, Any] = {
    "job": job(JobKind.LOAD),
    "empty plan": StepPlan(step=3),
    "plan": StepPlan(step=3, jobs=tuple(job(kind, kind.value) for kind in JobKind)),
    "report": Report(
        done={7: 1}, failed={8: 2}, ready_slots={1: 32}, stats=TransferStats(load_blocks=3, load_seconds=0.25)
    ),
    "rank": RankInfo(
        rank=1,
        pool_slots=64,
        chunk_blocks=16,
        layers=32,
        block_bytes=2097152,
        pinned=True,
        device="cuda",
        geometry="aa" * 32,
        attention_backend="FLASH_ATTN",
        isa=None,
        ready_slots=32,
    ),
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages_survive_pickling(message: Any, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(message, protocol))
    assert type(back) is type(message)
    assert back == message
    for name in [field.name for field in dataclasses.fields(message)]:
        assert type(getattr(back, name)) is type(getattr(message, name))


def test_kind_is_a_kind_after_pickling() -> None:
    assert pickle.loads(pickle.dumps(job(JobKind.SAVE))).kind is JobKind.SAVE


@pytest.mark.parametrize("name", ["job", "plan", "rank"])
def test_plans_cannot_be_changed(name: str) -> None:
    message = MESSAGES[name]
    with pytest.raises(AttributeError):
        setattr(message, dataclasses.fields(message)[0].name, 0)
    assert not hasattr(message, "__dict__")


@pytest.mark.parametrize(
    ("kinds", "gated"),
    [
        ((), False),
        ((JobKind.SAVE,), False),
        ((JobKind.PARKED_LOAD, JobKind.SAVE), False),
        ((JobKind.SAVE, JobKind.LOAD), True),
    ],
)
def test_only_loads_of_the_step_and_released_ones_gate_it(kinds: tuple[JobKind, ...], gated: bool) -> None:
    jobs = tuple(job(kind) for kind in kinds)
    assert StepPlan(step=0, jobs=jobs).gated is gated
    assert StepPlan(step=0, jobs=jobs, released=(7,)).gated


@pytest.mark.parametrize(
    ("part", "layers", "after"),
    [
        ((1, 8), 8, 0),
        ((5, 8), 8, 4),
        ((8, 8), 8, None),
        # Stages with fewer layers: the same part of theirs, rounded up.
        ((5, 8), 4, 2),
        ((1, 8), 4, 0),
        ((7, 8), 4, None),
        ((1, 8), 1, None),
        ((4, 8), 1, None),
    ],
)
def test_a_rank_releases_a_load_after_its_part_of_its_own_layers(
    part: tuple[int, int], layers: int, after: int | None
) -> None:
    assert dataclasses.replace(job(JobKind.PARKED_LOAD), release_after=part).released_at(layers) == after
    assert job(JobKind.PARKED_LOAD).released_at(layers) is None


counts = st.dictionaries(st.integers(0, 5), st.integers(1, 4), max_size=4)
reports = st.builds(
    Report,
    done=counts,
    failed=counts,
    released=counts,
    ready_slots=counts,
    moved=st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
    tiers=st.dictionaries(st.integers(0, 2), st.builds(TierTraffic, read_bytes=st.integers(0, 9)), max_size=2),
    stats=st.builds(TransferStats, load_blocks=st.integers(0, 9)),
)


@given(reports, reports, reports)
def test_reports_merge_in_any_order(a: Report, b: Report, c: Report) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(Report()) == a


@given(reports, reports)
def test_merging_counts_ranks_of_each_job_and_changes_nothing(a: Report, b: Report) -> None:
    before = pickle.dumps((a, b))
    total = a.merge(b)
    for name in ("done", "failed", "released"):
        mine, theirs, both = getattr(a, name), getattr(b, name), getattr(total, name)
        assert both == {job_id: mine.get(job_id, 0) + theirs.get(job_id, 0) for job_id in {*mine, *theirs}}
        assert both is not mine and both is not theirs
    assert total.stats == a.stats.merge(b.stats)
    assert pickle.dumps((a, b)) == before


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Report)])
def test_no_field_of_a_report_is_lost_in_merging(name: str) -> None:
    """Fails for a new field until this test and `merge` know it."""
    value = {
        "done": {1: 2},
        "failed": {3: 4},
        "released": {6: 1},
        "ready_slots": {0: 6},
        "moved": {5: (1, 7)},
        "tiers": {0: TierTraffic(read_objects=2)},
        "measured": Measured(saves=[("staged", 8, 0.5)]),
        "stats": TransferStats(save_bytes=5),
        "loads": (LoadTimes("parked", 2.0, None),),
    }[name]
    full = Report(**{name: value})  # type: ignore[arg-type]
    assert Report().merge(full) == full
    assert full.merge(Report()) == full


def test_of_a_tier_job_what_every_rank_moved_counts() -> None:
    first, second = Report(moved={1: (1, 4), 2: (1, 0)}), Report(moved={1: (1, 3), 3: (1, 5)})
    assert first.merge(second).moved == second.merge(first).moved == {1: (2, 3), 2: (1, 0), 3: (1, 5)}


def test_of_each_rank_the_most_ready_slots_count() -> None:
    early, late = Report(ready_slots={0: 8, 1: 32}), Report(ready_slots={0: 16, 2: 4})
    assert early.merge(late).ready_slots == late.merge(early).ready_slots == {0: 16, 1: 32, 2: 4}


def test_reports_share_nothing_by_default() -> None:
    first = Report()
    first.done[1] = 1
    first.stats.load_blocks = 1
    assert Report() == Report(done={}, failed={}, stats=TransferStats())
