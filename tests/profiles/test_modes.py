from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from layerstream.decisions import LoadMode
from layerstream.jobs import JobKind, StepPlan
from layerstream.streams.base import Event
from layerstream.streams.virtual_streams import VirtualStream
from profiles.modes.__main__ import ROOT, main
from profiles.modes.grid import CLOSE, Row, cases, row
from profiles.modes.page import BEGIN, END, put_into
from profiles.modes.simulation import Case, mixed_layer_s, simulate
from tests.contracts import test_virtual_time as timed
from tests.rigs.engine_rig import job

EPSILON = 1e-9


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row(case) for case in cases()]


def test_the_rule_is_within_two_percent_of_the_best_mode_everywhere(rows: list[Row]) -> None:
    assert len(rows) > 2000
    assert max(row.loss for row in rows) <= CLOSE


def test_parking_with_the_rule_never_holds_up_others_more_than_parking_to_the_end(rows: list[Row]) -> None:
    parked = [row for row in rows if row.mode is LoadMode.PARKED]
    assert len(parked) > 500
    assert max(row.extra_gap for row in parked) <= 1 + EPSILON
    assert {row.auto.stall for row in parked} == {0.0}


def test_a_layerwise_load_beside_others_holds_them_up_by_its_first_layer_at_most(rows: list[Row]) -> None:
    layerwise = [row for row in rows if row.mode is LoadMode.LAYERWISE and row.case.running]
    assert len(layerwise) > 300
    for its in layerwise:
        assert its.auto.stall <= its.case.load_layer_s + EPSILON <= mixed_layer_s(its.case) + 2 * EPSILON
        assert its.extra_gap <= 1 + 1 / its.case.layers + EPSILON
    ahead = [its for its in layerwise if its.case.lag_steps > 1 and its.case.load_layer_s <= its.case.step_s]
    assert ahead and max(its.extra_gap for its in ahead) <= 1 + EPSILON


def test_the_rule_is_never_later_than_parking_to_the_end(rows: list[Row]) -> None:
    assert all(row.auto.first_token <= row.parked.first_token + EPSILON for row in rows)
    assert any(row.auto.first_token < 0.6 * row.parked.first_token for row in rows if row.mode is LoadMode.PARKED)


def test_nothing_is_parked_where_nothing_else_runs(rows: list[Row]) -> None:
    alone = [row for row in rows if not row.case.running]
    assert alone and {row.mode for row in alone} == {LoadMode.LAYERWISE}
    assert all(row.auto.first_token <= row.parked.first_token for row in alone)


def test_a_layer_sooner_would_hold_up_the_others(rows: list[Row]) -> None:
    """The rule releases in the first step that it can, so no layer whose release reaches an earlier one is quiet."""
    for its in rows:
        if its.mode is LoadMode.PARKED:
            sooner = [simulate(its.case, LoadMode.PARKED, layer) for layer in range(its.release or 0)]
            early = [times for times in sooner if times.first_token < its.auto.first_token - EPSILON]
            assert all(times.stall > 0 for times in early)


# The real engine on virtual streams.

LAYERS = timed.LAYERS
QUICK = replace(timed.FREE_HOST, kernel_latency_s=0.0)


class Engine:
    """An engine loop over the worker half: one step at a time, or two in flight."""

    def __init__(self, case: Case) -> None:
        self.case = case
        costs = replace(QUICK, copy_bytes_per_s=timed.LAYER_BYTES / case.load_layer_s)
        self.rig = timed.Rig(costs, path="batch_dma")
        self.device = self.rig.device
        self.ends = [0.0]
        """Of the steps so far."""

    def step(self, number: int, plan: StepPlan | None, layer_s: float) -> set[int]:
        """Queue a step, let time pass until it ends; returns the loads that it reported released or done."""
        engine = self.rig.engine
        engine.begin_step(plan)
        gated = plan is not None and plan.gated
        if gated:
            engine.start_loads(layerwise=True)
        for layer in range(LAYERS):
            engine.wait_layer(layer)
            self.rig.compute(layer_s)
        if not gated:
            engine.start_loads(layerwise=True)
        engine.end_step()
        end = self.rig.mark()
        # The host queues a step in no time, and then asks what has ended.
        self.device.run(until=self.device.host_clock)
        report = engine.poll()
        self._run_to(end)
        self.device.host_clock = self.device.reached_at(end)
        self.ends.append(self.device.host_clock)
        return set() if report is None else {*report.released, *report.done}

    def _run_to(self, end: Event) -> None:
        """Run what starts before `end`, in order."""

        def choose(ready: list[VirtualStream]) -> VirtualStream:
            if end.done():
                raise _AtEnd
            return self.device._earliest(ready)

        with suppress(_AtEnd):
            self.device.run(choose)


class _AtEnd(Exception):
    """The step has ended."""


def serve(case: Case, mode: LoadMode, release: int | None) -> tuple[float, float]:
    """First token and longest gap, by the engine itself, one step at a time."""
    engine = Engine(case)
    kind = JobKind.LOAD if mode is LoadMode.LAYERWISE else JobKind.PARKED_LOAD
    load = job(1, kind, list(range(timed.BLOCKS)), (0, timed.BLOCKS))
    if release is not None:
        load = replace(load, release_after=(release + 1, LAYERS))
    mixed = mixed_layer_s(case)
    if mode is LoadMode.LAYERWISE:
        engine.step(1, StepPlan(step=1, jobs=(load,)), mixed)
    else:
        heard = engine.step(1, StepPlan(step=1, jobs=(load,)), case.step_s / LAYERS)
        for number in itertools.count(2):
            if heard:
                engine.step(number, StepPlan(step=number, released=(1,)), mixed)
                break
            heard = engine.step(number, None, case.step_s / LAYERS)
    gaps = [after - before for before, after in itertools.pairwise(engine.ends)]
    return engine.ends[-1], max(gaps)


CASES = [
    Case(load_layer_s=b, compute_layer_s=c, layers=LAYERS, step_s=s, running=4)
    for b, c, s in ((3.1e-3, 1.3e-3, 7e-3), (0.7e-3, 1.1e-3, 4e-3), (9.3e-3, 0.2e-3, 5e-3), (2.2e-3, 2.9e-3, 40e-3))
]


def choices() -> Iterator[tuple[LoadMode, int | None]]:
    yield LoadMode.LAYERWISE, None
    yield LoadMode.PARKED, None
    for layer in range(LAYERS - 1):
        yield LoadMode.PARKED, layer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_simulation_says_what_the_engine_does_on_virtual_streams(case: Case) -> None:
    for mode, release in choices():
        times = simulate(case, mode, release)
        assert serve(case, mode, release) == pytest.approx((times.first_token, times.longest_gap), rel=1e-6), (
            f"{mode}, released after {release}"
        )


def test_the_command_writes_every_case_and_what_the_docs_show(tmp_path: Path) -> None:
    shown = (ROOT / "docs" / "modes.md").read_text()
    (tmp_path / "modes.md").write_text(put_into(shown, "gone\n"))
    assert main(["--out", str(tmp_path), "--docs", str(tmp_path)]) == 0
    recorded = json.loads((tmp_path / "modes.json").read_text())
    assert len(recorded["cases"]) == recorded["cases_tried"] and recorded["worst_loss"] <= CLOSE
    assert (tmp_path / "images" / "modes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "modes.md").read_text() == shown, "run python -m profiles.modes"


@pytest.mark.parametrize("page", ["", BEGIN, END + BEGIN, BEGIN + BEGIN + END, BEGIN + END + END])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each; put them where the table is"):
        put_into(page, "")
