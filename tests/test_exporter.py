"""What is exported is what was counted, however often it is taken, and whoever else takes counts for the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.exporter import Exporter, Sample, add_samples
from layerstream.jobs import JobKind, Report
from layerstream.metric_table import METRICS, MetricKind
from layerstream.metrics import CacheStats, LoadTimes, TierTraffic, TransferStats
from layerstream.tiers.base import Usage
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import B, TieringRig, chain


def exporter_of(rig: TieringRig, working: Callable[[], bool] = lambda: True) -> Exporter:
    exporter = Exporter(rig.coordinator, working)
    exporter.block_tokens, exporter.pool_slot_bytes = B, 1000
    return exporter


def counted(sample: Sample | None, name: str, *labels: str) -> float:
    value = (sample or {}).get(name, {}).get(labels, 0.0)
    assert not isinstance(value, list)
    return value


PROMPTS = [chain(f"{prompt} {block}" for block in range(6 + prompt)) for prompt in range(5)]


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(st.integers(0, 4), st.sampled_from(["take", "line", "report", "reset"])), min_size=1, max_size=30
    )
)
def test_samples_and_lines_each_add_up_to_all_that_was_counted(steps: list[int | str]) -> None:
    rig = TieringRig(slots=6)
    exporter = exporter_of(rig)
    samples: list[Sample] = []
    lines = CacheStats()
    sent = TransferStats()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            rig.serve(f"{number}", PROMPTS[step])
        elif step == "take":
            samples += filter(None, [exporter.take()])
        elif step == "line":
            lines = lines.merge(rig.coordinator.take_stats())
        elif step == "report":
            report = Report(stats=TransferStats(load_blocks=number, save_bytes=3, verified_blocks=1))
            sent = sent.merge(report.stats)
            exporter.add(report)
        else:
            rig.coordinator.reset()
    samples += filter(None, [exporter.take()])
    lines = lines.merge(rig.coordinator.take_stats())
    total: Sample = reduce(add_samples, samples, {})
    assert lines == rig.coordinator.stats
    assert counted(total, "queried_tokens") == lines.queried_tokens
    assert counted(total, "hit_tokens", "host") == lines.hit_tokens
    assert counted(total, "decisions", "fixed") == lines.decisions.get("fixed", 0)
    assert counted(total, "saved_blocks") == lines.saved_blocks
    assert counted(total, "dropped_save_blocks") == lines.dropped_blocks
    assert counted(total, "evicted_chunks") == lines.evicted_chunks
    assert sum(total.get("returned_chunks", {}).values()) == sum(lines.returned_chunks.values())  # type: ignore[arg-type]
    assert counted(total, "transfer_blocks", "load") == sent.load_blocks
    assert counted(total, "transfer_bytes", "save") == sent.save_bytes
    assert counted(total, "verified_blocks") == sent.verified_blocks
    assert counted(total, "pool_used_slots") == rig.coordinator.pool_used


def test_nothing_is_told_twice_and_an_idle_step_tells_nothing() -> None:
    rig = TieringRig(FakeTier())
    exporter = exporter_of(rig)
    assert exporter.take() is not None
    assert exporter.take() is None
    rig.serve("a", PROMPTS[0])
    report = Report(stats=TransferStats(load_bytes=5), tiers={0: TierTraffic(read_bytes=7)})
    exporter.add(report)
    first = exporter.take()
    assert counted(first, "saved_blocks") == len(PROMPTS[0])
    for _ in range(3):
        rig.turn()
        assert exporter.take() is None
    exporter.add(report)
    second = exporter.take()
    for sample in (first, second):
        assert counted(sample, "transfer_bytes", "load") == 5 and counted(sample, "tier_bytes", "tier0", "read") == 7


@pytest.mark.parametrize("parked", [False, True], ids=["gated", "parked"])
def test_jobs_and_pins_are_told_while_they_last(parked: bool) -> None:
    rig = TieringRig(parked=parked)
    exporter = exporter_of(rig)
    rig.serve("a", PROMPTS[0])
    rig.ask("b", PROMPTS[0])
    rig.admit("b", PROMPTS[0], external=4)
    rig.plan()
    kind = "parked_load" if parked else "load"
    during = exporter.take()
    assert counted(during, "jobs", kind) == 1 and counted(during, "pool_pinned_slots") == 1
    rig.turn()
    after = exporter.take()
    assert counted(after, "jobs", kind) == 0 and counted(after, "pool_pinned_slots") == 0
    assert (after or {})["jobs"][kind,] == 0.0, "a gauge that is not told keeps its old value"


def test_jobs_that_no_rank_answers_are_told_as_expired_and_overdue_until_it_does() -> None:
    rig = TieringRig()
    exporter = exporter_of(rig)
    rig.admit("a", PROMPTS[0])
    rig.compute("a", PROMPTS[0])
    rig.plan()
    rig.clock.now += 61.0
    rig.coordinator.expire()
    late = exporter.take()
    assert counted(late, "failures", "host", "expired") == 1 == counted(late, "overdue_jobs")
    assert counted(late, "jobs", "save") == 0
    rig.coordinator.report(rig.run(rig.jobs.pop(), 0))
    assert counted(exporter.take(), "overdue_jobs") == 0


def test_failures_are_told_by_kind() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1), parked=True)
    exporter = exporter_of(rig)
    rig.admit("a", PROMPTS[0])
    rig.compute("a", PROMPTS[0])
    rig.plan()
    rig.coordinator.report(rig.run(rig.jobs.pop(), 0, failed=True))
    rig.serve("b", PROMPTS[0])
    rig.ask("c", PROMPTS[0])
    rig.admit("c", PROMPTS[0], external=2)
    rig.plan()
    rig.coordinator.report(rig.run(rig.jobs.pop(), 0, failed=True))
    traffic = TierTraffic(missing_objects=3, damaged_objects=4, read_failures=5, write_failures=6)
    exporter.add(Report(tiers={1: traffic}))
    rig.tiers[1].stats.late_answers = 7
    sample = exporter.take()
    assert (sample or {})["failures"] == {
        ("host", "save"): 1, ("host", "load"): 1, ("tier1", "missing"): 3, ("tier1", "damaged"): 4,
        ("tier1", "read"): 5, ("tier1", "write"): 6, ("tier1", "late"): 7,
    }  # fmt: skip


def test_what_tiers_do_and_how_they_are_is_told_by_name() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1, at_once=False))
    exporter = exporter_of(rig)
    rig.serve("a", PROMPTS[2])
    rig.tiers[0].last_usage = Usage(used_bytes=5, capacity_bytes=None, objects=1)
    rig.tiers[1].fall_ill()
    exporter.add(Report(tiers={0: TierTraffic(written_objects=2, written_bytes=20, write_seconds=0.5)}))
    exporter.add(Report(tiers={0: TierTraffic(written_objects=1, written_bytes=10, read_bytes=7)}))
    sample = exporter.take() or {}
    assert sample["tier_healthy"] == {("tier0",): 1.0, ("tier1",): 0.0}
    assert sample["tier_used_bytes"] == {("tier0",): 5.0} and "tier_capacity_bytes" not in sample
    assert sample["tier_objects"] == {("tier0", "write"): 3}
    assert sample["tier_bytes"] == {("tier0", "read"): 7, ("tier0", "write"): 30}
    assert sample["tier_lookups"] == {(tier.name,): tier.count("find") for tier in rig.tiers}


def test_objects_that_wait_and_those_that_were_dropped_are_told() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    exporter = exporter_of(rig)
    rig.admit("a", PROMPTS[2])
    rig.compute("a", PROMPTS[2])
    rig.turn()
    rig.turn()
    assert counted(exporter.take(), "tier_queue_objects", "tier0") == 2
    rig.coordinator.reset()
    sample = exporter.take()
    assert counted(sample, "tier_dropped_objects", "tier0") == 2
    assert (sample or {})["tier_queue_objects"]["tier0",] == 0.0 == (sample or {})["tier_healthy"]["tier0",]


def test_requests_that_wait_and_what_was_brought_for_them_are_told() -> None:
    rig = TieringRig(FakeTier())
    exporter = exporter_of(rig)
    for one in rig.objects(PROMPTS[2]):
        rig.tiers[0].put(one, PROMPTS[2])
    assert rig.ask("a", PROMPTS[2]) is None
    rig.plan()
    waiting = exporter.take()
    assert counted(waiting, "waiting_requests") == 1 == counted(waiting, "jobs", "promote")
    assert rig.serve("a", PROMPTS[2]) == len(PROMPTS[2])
    served = exporter.take()
    assert counted(served, "promoted_blocks") == len(PROMPTS[2]) and counted(served, "waiting_requests") == 0
    assert (served or {})["hit_tokens"] == {("tier0",): len(PROMPTS[2]) * B}
    assert (served or {})["hit_requests"] == {("tier0",): 1} and (served or {})["decisions"] == {("fixed",): 1}
    assert rig.serve("b", PROMPTS[2]) == len(PROMPTS[2])
    assert (exporter.take() or {})["hit_tokens"] == {("host",): len(PROMPTS[2]) * B}


def test_loads_are_observed_one_by_one_and_a_stall_that_nobody_timed_not_at_all() -> None:
    rig = TieringRig()
    exporter = exporter_of(rig)
    exporter.add(Report(loads=(LoadTimes("layerwise", 0.5, 0.0), LoadTimes("parked", 2.0, None))))
    exporter.add(Report(loads=(LoadTimes("layerwise", 0.25, 0.125),)))
    sample = exporter.take() or {}
    assert sample["load_seconds"] == {("layerwise",): [0.5, 0.25], ("parked",): [2.0]}
    assert sample["load_stall_seconds"] == {("layerwise",): [0.0, 0.125]}


def test_an_engine_that_gave_up_says_so() -> None:
    works = True
    exporter = exporter_of(TieringRig(), lambda: works)
    assert counted(exporter.take(), "working") == 1
    works = False
    assert counted(exporter.take(), "working") == 0


values: dict[MetricKind, Any] = {
    MetricKind.COUNTER: st.integers(1, 1 << 40).map(float),
    MetricKind.GAUGE: st.integers(0, 1 << 40).map(float),
    MetricKind.HISTOGRAM: st.lists(st.integers(0, 9).map(float), min_size=1, max_size=3),
}


@st.composite
def made_samples(draw: st.DrawFn) -> Sample:
    names = draw(st.lists(st.sampled_from(["saved_blocks", "pool_slots", "load_seconds"]), unique=True))
    labels: dict[str, Any] = {
        "saved_blocks": st.just(()),
        "pool_slots": st.just(()),
        "load_seconds": st.sampled_from([("a",), ("b",)]),
    }
    return {name: {draw(labels[name]): draw(values[METRICS[name].kind])} for name in names}


@given(made_samples(), made_samples(), made_samples())
def test_samples_can_be_joined_in_any_grouping_and_are_not_changed_by_it(a: Sample, b: Sample, c: Sample) -> None:
    before = repr((a, b, c))
    assert add_samples(add_samples(a, b), c) == add_samples(a, add_samples(b, c))
    assert add_samples(a, {}) == add_samples({}, a) == a
    assert repr((a, b, c)) == before


def test_of_a_gauge_the_later_value_counts() -> None:
    assert add_samples({"pool_slots": {(): 1.0}}, {"pool_slots": {(): 0.0}}) == {"pool_slots": {(): 0.0}}


def test_every_kind_of_job_is_a_label_that_is_documented() -> None:
    from layerstream.metric_table import LABELS

    assert all(f"`{kind.name.lower()}`" in LABELS["kind"] for kind in JobKind)
