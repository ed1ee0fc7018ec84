"""The way of the counts through vLLM: taken once a step, added up, registered under vLLM's labels, set and observed."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.mmap_dict import MmapedDict
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from layerstream.exporter import Sample
from layerstream.hooks.vllm.connector import LayerStreamConnector
from layerstream.hooks.vllm.register import register
from layerstream.hooks.vllm.scheduler import logger
from layerstream.hooks.vllm.stats import LayerStreamPromMetrics, LayerStreamStats
from layerstream.metric_table import METRICS, PREFIX, MetricKind
from tests.hooks.vllm.test_tiers import drain
from tests.rigs.installed_tiers import write_weights
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
LABELS = ["model_name", "engine"]


@pytest.fixture
def make_metrics() -> Iterator[Callable[..., LayerStreamPromMetrics]]:
    unregister_vllm_metrics()
    config: Any = SimpleNamespace(kv_transfer_config=None)

    def make(engines: int = 1) -> LayerStreamPromMetrics:
        labels: dict[int, list[object]] = {engine: ["tiny", str(engine)] for engine in range(engines)}
        return LayerStreamConnector.build_prom_metrics(config, dict(TYPES), list(LABELS), labels)

    yield make
    unregister_vllm_metrics()


def read(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", {"model_name": "tiny", "engine": "0", **labels})


def test_counters_add_up_gauges_are_set_and_observations_fall_into_buckets(
    make_metrics: Callable[..., LayerStreamPromMetrics],
) -> None:
    metrics = make_metrics()
    metrics.observe({"saved_blocks": {(): 3}, "pool_slots": {(): 8.0}, "hit_tokens": {("disk",): 16, ("host",): 32}})
    metrics.observe({"saved_blocks": {(): 4}, "pool_slots": {(): 6.0}, "hit_tokens": {("disk",): 16}})
    metrics.observe({"load_seconds": {("layerwise",): [0.0002, 0.5]}})
    assert read("saved_blocks_total") == 7 and read("pool_slots") == 6
    assert read("hit_tokens_total", tier="disk") == 32 == read("hit_tokens_total", tier="host")
    assert read("load_seconds_sum", mode="layerwise") == 0.5002
    assert [read("load_seconds_bucket", mode="layerwise", le=le) for le in ("0.0001", "0.0003", "0.3", "1.0")] == [
        0, 1, 1, 2,
    ]  # fmt: skip


def test_engines_have_series_of_their_own(make_metrics: Callable[..., LayerStreamPromMetrics]) -> None:
    metrics = make_metrics(engines=2)
    metrics.observe({"saved_blocks": {(): 3}, "jobs": {("save",): 1.0}}, 0)
    metrics.observe({"saved_blocks": {(): 5}, "jobs": {("save",): 2.0}}, 1)
    assert [read("saved_blocks_total", engine=engine) for engine in "01"] == [3, 5]
    assert [read("jobs", engine=engine, kind="save") for engine in "01"] == [1, 2]


def test_counters_are_there_before_anything_is_counted(make_metrics: Callable[..., LayerStreamPromMetrics]) -> None:
    make_metrics(engines=2)
    for engine in "01":
        for metric in METRICS.values():
            if metric.kind is MetricKind.COUNTER and not metric.labels:
                assert read(f"{metric.name}_total", engine=engine) == 0.0
        assert read("failures_total", engine=engine, tier="host", kind="load") == 0.0


def test_every_metric_is_registered_by_its_name_and_can_be_registered_again(
    make_metrics: Callable[..., LayerStreamPromMetrics],
) -> None:
    """As in a process that makes one engine after another."""
    make_metrics()
    families = {line.split()[2] for line in generate_latest(REGISTRY).decode().splitlines() if "# TYPE" in line}
    assert {metric.exported_name for metric in METRICS.values()} <= families
    unregister_vllm_metrics()
    make_metrics()


def test_processes_behind_one_endpoint_are_added_up_and_the_last_gauge_counts(
    make_metrics: Callable[..., LayerStreamPromMetrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends each step's statistics to one of its API servers; one endpoint answers for all of them."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    opened: list[Any] = []

    class Opened(MmapedDict):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)  # type: ignore[no-untyped-call]
            opened.append(self)

    monkeypatch.setattr(values, "MmapedDict", Opened)
    for number in (3, 4):
        # What prometheus_client chooses where that variable was set before its import: values in one file a process.
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda number=number: number))  # type: ignore[no-untyped-call]
        unregister_vllm_metrics()
        make_metrics().observe(
            {"saved_blocks": {(): number}, "pool_slots": {(): float(number)}, "load_seconds": {("whole",): [number]}}
        )
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    for file in opened:
        file.close()
    said = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    assert said[f"{PREFIX}saved_blocks_total"] == 7.0
    assert said[f"{PREFIX}pool_slots"] == 4.0
    assert (said[f"{PREFIX}load_seconds_sum"], said[f"{PREFIX}load_seconds_count"]) == (7.0, 2.0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the scheduler half logs."""
    lines: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *arguments: lines.append(text % arguments if arguments else text))
    return lines


SAMPLE: Sample = {
    "queried_tokens": {(): 100}, "hit_tokens": {("host",): 60, ("disk",): 20},
    "transfer_bytes": {("load",): 4_000_000_000, ("save",): 1_000_000}, "transfer_seconds": {("load",): 2.0},
    "load_seconds": {("layerwise",): [1.0, 0.5], ("whole",): [0.5], ("parked",): [9.0]},
    "load_stall_seconds": {("layerwise",): [0.1], ("whole",): [0.4]},
    "pool_slots": {(): 8.0}, "pool_used_slots": {(): 2.0}, "failures": {("host", "load"): 1, ("disk", "late"): 2},
}  # fmt: skip


def test_an_interval_in_vllms_log_is_a_few_numbers() -> None:
    assert LayerStreamStats(SAMPLE).reduce() == {
        "LayerStream queried tokens": 100, "hit tokens": 80, "loaded MB": 4000.0, "saved MB": 1.0, "load GB/s": 2.0,
        "overlap": 0.75, "pool use %": 25.0, "failures": 3,
    }  # fmt: skip
    assert LayerStreamStats({}).is_empty() and not LayerStreamStats({})


def test_the_logs_overlap_compares_stalls_with_the_time_of_the_same_loads() -> None:
    stalls = {**SAMPLE["load_stall_seconds"], ("parked",): [0.2]}
    told = LayerStreamStats({**SAMPLE, "load_stall_seconds": stalls}).reduce()
    assert told["overlap"] == LayerStreamStats(SAMPLE).reduce()["overlap"]


def test_vllms_logger_adds_steps_up_and_leaves_what_others_read_alone() -> None:
    register()
    transfer: Any = SimpleNamespace(kv_connector="LayerStreamConnector", kv_connector_module_path=None)
    log = KVConnectorLogging(transfer)
    # As it comes through the socket between vLLM's processes.
    first, second = (msgspec.msgpack.decode(msgspec.msgpack.encode(SAMPLE)) for _ in range(2))
    assert first == SAMPLE
    lines: list[Any] = []
    log.observe(first)
    log.observe(second)
    log.log(lambda *line: lines.append(line))
    assert "LayerStream queried tokens=200, hit tokens=160" in lines[0][1]
    assert first == second == SAMPLE
    log.log(lambda *line: lines.append(line))
    assert len(lines) == 1


def steps_stats(rig: SchedulerRig) -> list[LayerStreamStats]:
    """What vLLM's scheduler gets from now on, step by step."""
    taken: list[LayerStreamStats] = []
    make = rig.scheduler.make_stats

    def look(spec: Any = None, connector: Any = None, *more: Any, **named: Any) -> Any:
        if connector is not None:
            taken.append(connector)
        return make(spec, connector, *more, **named)

    rig.scheduler.make_stats = look
    return taken


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_scheduler_gets_is_what_was_served_and_the_log_has_it_too(
    make_rig: MakeRig, ranks: int, said: list[str]
) -> None:
    rig = make_rig(ranks=ranks, options={"log_interval_s": 0.0001})
    taken = steps_stats(rig)
    ids = prompt(6 * BLOCK + 3)
    rig.serve("a", ids)
    rig.scheduler.reset_prefix_cache()
    rig.serve("b", ids)
    rig.serve("c", prompt(5, seed=3), max_tokens=3)
    total = LayerStreamStats({})
    for each in taken:
        assert not each.is_empty()
        total = total.aggregate(each)
    data = total.data
    assert data["queried_tokens"] == {(): 2 * len(ids) + 5}
    assert data["hit_tokens"] == {("host",): 6 * BLOCK}
    assert data["transfer_blocks"] == {("load",): 6 * ranks, ("save",): 6 * ranks}
    assert sum(len(seconds) for seconds in data["load_seconds"].values()) == ranks
    assert data["saved_blocks"] == {(): 6}
    assert data["pool_bytes"][()] == data["pool_slots"][()] * 4 * ranks * BLOCK * 4 * 8 * 3
    rig.connector.scheduler.close()
    lines = [line for line in said if "LayerStream: hit" in line]
    counts = [line.split("hit ")[1].split(" ")[0].split("/") for line in lines]
    assert [sum(map(int, column)) for column in zip(*counts, strict=True)] == [6 * BLOCK, 2 * len(ids) + 5]


def test_a_step_that_neither_loads_nor_saves_has_nothing_to_say(make_rig: MakeRig) -> None:
    rig = make_rig(options={"save_decode": False})
    rig.serve("a", prompt(2 * BLOCK + 3))
    rig.add("b", prompt(4), max_tokens=30)
    rig.step()
    rig.step()
    taken = steps_stats(rig)
    for _ in range(20):
        rig.step()
    assert taken == []


def test_workers_have_nothing_to_say_beside_their_reports(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.serve("a", prompt(2 * BLOCK + 3))
    assert [worker.get_kv_connector_stats() for worker in rig.workers] == [None]


def test_vllm_counts_a_hit_for_the_tier_it_came_from_and_the_next_one_for_the_host(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """A pool of four chunks: two long prompts of others take the first one's place, and it comes back from disk."""
    write_weights(tmp_path)
    folder = tmp_path.with_name(f"{tmp_path.name}-kv")
    folder.mkdir(mode=0o700)
    tiers = [{"type": "disk", "path": str(folder), "gib": 1, "lookup_ms": 20_000}]
    rig = make_rig(options={"host_gib": 4 * 6144 / (1 << 30) * 1.2, "chunk_tokens": 4 * BLOCK, "tiers": tiers})
    sources: Counts[CacheHitSource] = Counts()
    make = rig.scheduler.make_stats

    def look(*arguments: Any, **more: Any) -> Any:
        stats = make(*arguments, **more)
        sources.update(stats.connector_prefix_cache_stats.hits_by_source)
        return stats

    rig.scheduler.make_stats = look
    ids = prompt(8 * BLOCK + 3)
    served: list[int] = []
    for name, tokens in (("a", ids), ("b", prompt(16 * BLOCK + 1, seed=2)), ("c", ids), ("d", ids)):
        served.append(rig.serve(name, tokens))
        drain(rig)
        rig.scheduler.reset_prefix_cache()
    rig.serve("last", [5])
    assert served == [0, 0, 8 * BLOCK, 8 * BLOCK]
    assert sources == {CacheHitSource.DISK: 8 * BLOCK, CacheHitSource.HOST: 8 * BLOCK}


def test_sources_that_do_not_sum_to_the_hit_are_the_hosts(make_rig: MakeRig) -> None:
    rig = make_rig()
    half = rig.connector.scheduler
    request: Any = SimpleNamespace(request_id="unknown")
    assert half.hit_sources(request, 48) == {rig.connector._cache_hit_source: 48}
    assert half.hit_sources(request, 0) == {}
