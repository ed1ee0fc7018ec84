"""The table of metrics, the document made from it, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from layerstream.exporter import Exporter
from layerstream.metric_table import LABELS, METRICS, PREFIX, MetricKind, reference

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "profiles" / "grafana" / "layerstream.json"

NOT_SHOWN = {
    "block_tokens": "a constant",
}
"""Metrics that the dashboard leaves out, and why."""

HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


def test_the_document_is_made_from_the_table() -> None:
    found = re.search(r"<!-- metrics: .*? -->\n(.*)<!-- end of metrics -->", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    assert found.group(1) == reference()


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_prometheus_conventions(name: str) -> None:
    metric = METRICS[name]
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and metric.name == name
    assert not name.endswith(("_total", "_count", "_sum", "_bucket")), "the client adds these"
    assert metric.exported_name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    assert not re.search(r"_(ms|us|milliseconds|kb|mb|mib|gib|percent|ratio)(_|$)", name), "not a base unit"
    assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert set(metric.labels) <= set(LABELS) and "engine" not in metric.labels


def test_every_label_is_used() -> None:
    assert {label for metric in METRICS.values() for label in metric.labels} == set(LABELS)


def expressions(dashboard: Any) -> list[str]:
    """Every PromQL expression of the dashboard, those of its variables included."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found + [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def test_the_dashboard_shows_what_is_exported_and_nothing_else(dashboard: Any) -> None:
    shown = {name for text in expressions(dashboard) for name in re.findall(rf"{PREFIX}\w+", text)}
    series = {
        metric.exported_name + part: metric.name
        for metric in METRICS.values()
        for part in (HISTOGRAM_SERIES if metric.kind is MetricKind.HISTOGRAM else ("",))
    }
    assert shown <= set(series), "these are exported by nobody"
    assert {series[name] for name in shown} == set(METRICS) - set(NOT_SHOWN)


def test_the_dashboard_asks_for_labels_that_its_metrics_have(dashboard: Any) -> None:
    by_name = {metric.exported_name: metric for metric in METRICS.values()}
    seen = 0
    for text in expressions(dashboard):
        for name, part, labels in re.findall(rf"({PREFIX}\w+?)(_bucket|_sum|_count)?{{([^}}]*)}}", text):
            asked = set(re.findall(r"(\w+)=", labels))
            assert asked <= {"model_name", "engine", *by_name[name].labels}, (text, part)
            seen += 1
        for group in re.findall(r"by \(([^)]*)\) \(?(?:rate|increase)?\(?(vllm:\w+)", text):
            wanted, name = group
            metric = by_name[re.sub(r"_(bucket|sum|count)$", "", name)]
            assert set(re.split(r", *", wanted)) <= {"le", *metric.labels}, text
    assert seen > 40


def test_counters_are_shown_as_rates_and_gauges_are_not(dashboard: Any) -> None:
    by_name = {metric.exported_name: metric for metric in METRICS.values()}
    for text in expressions(dashboard):
        for function, name in re.findall(rf"(\w*)\(({PREFIX}\w+)", text):
            metric = by_name.get(name)
            counts = metric is None or metric.kind is MetricKind.COUNTER
            assert (function in {"rate", "increase"}) is counts, text


def test_stalls_are_compared_with_the_time_of_the_same_loads(dashboard: Any) -> None:
    """Parked loads stall too, once they are released, and are not among those that are to be hidden."""
    seen = 0
    for text in (*expressions(dashboard), DOCUMENT.read_text()):
        for labels in re.findall(r"1 - sum\(rate\(vllm:layerstream_load_stall_seconds_sum(.*?)\n", text + "\n"):
            stalled, loaded = re.findall(r'mode=~"([a-z|\\]+)"', labels)
            assert stalled == loaded
            seen += 1
    assert seen == 2


def test_the_dashboard_has_panels_that_do_not_overlap(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_each_query_of_the_document_names_what_is_exported() -> None:
    series = {metric.exported_name for metric in METRICS.values()} | {
        metric.exported_name + part
        for metric in METRICS.values()
        for part in HISTOGRAM_SERIES
        if metric.kind is MetricKind.HISTOGRAM
    }
    named = set(re.findall(rf"{PREFIX}\w+", DOCUMENT.read_text()))
    assert named <= series


def test_every_metric_is_set_somewhere() -> None:
    """A name in the table that nothing sets would stay empty for ever."""
    source = Path(Exporter.__module__.replace(".", "/") + ".py")
    text = (ROOT / source).read_text()
    assert {name for name in METRICS if f'"{name}"' not in text} == set()
