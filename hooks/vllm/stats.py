"""The metrics as vLLM carries them: from the scheduler half through vLLM's statistics to its endpoint and its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from layerstream.exporter import add_samples
from layerstream.metric_table import METRICS, Metric, MetricKind
from layerstream.metrics import HOST

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from layerstream.exporter import Labels, Sample, Value

_CLASSES = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge, MetricKind.HISTOGRAM: Histogram}


@dataclass
class LayerStreamStats(KVConnectorStats):
    """What was counted in some steps of one engine. `data` is a `layerstream.exporter.Sample`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> LayerStreamStats:
        """Add what later steps counted; returns a new object, since loggers share `data`."""
        return LayerStreamStats(add_samples(self.data, other.data))

    def is_empty(self) -> bool:
        return not self.data

    def __bool__(self) -> bool:
        return bool(self.data)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of an interval."""
        sample: Sample = self.data
        loaded, saved = _sum(sample, "transfer_bytes", "load"), _sum(sample, "transfer_bytes", "save")
        numbers: dict[str, int | float] = {
            "LayerStream queried tokens": int(_sum(sample, "queried_tokens")),
            "hit tokens": int(_sum(sample, "hit_tokens")),
            "loaded MB": round(loaded / 1e6, 1),
            "saved MB": round(saved / 1e6, 1),
        }
        for what, nbytes, direction in (("load", loaded, "load"), ("save", saved, "save")):
            if (seconds := _sum(sample, "transfer_seconds", direction)) > 0:
                numbers[f"{what} GB/s"] = round(nbytes / seconds / 1e9, 2)
        # Released loads stall steps too, and most of their time nobody could wait for them.
        gated, stalled = (
            sum(_sum(sample, name, mode) for mode in ("layerwise", "whole"))
            for name in ("load_seconds", "load_stall_seconds")
        )
        if gated > 0:
            numbers["overlap"] = round(max(0.0, 1 - stalled / gated), 3)
        if slots := _sum(sample, "pool_slots"):
            numbers["pool use %"] = round(100 * _sum(sample, "pool_used_slots") / slots, 1)
        for name, what in (("dropped_save_blocks", "blocks not saved"), ("failures", "failures")):
            if count := int(_sum(sample, name)):
                numbers[what] = count
        return numbers


class LayerStreamPromMetrics(KVConnectorPromMetrics):
    """The table's metrics, registered with vLLM's kinds of metrics (which differ under Ray) and its labels.

    With several processes behind one endpoint vLLM sends a step's statistics to one of them: Prometheus' client adds up
    their counters, and of gauges takes what was set last.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[_CLASSES[metric.kind]](
                name=metric.full_name,
                documentation=f"LayerStream: {metric.text}.",
                labelnames=[*labelnames, *metric.labels],
                **_options(metric),
            )
            for name, metric in METRICS.items()
        }
        # A counter that is there from the start has a rate from its first step on.
        for values in per_engine_labelvalues.values():
            for name, metric in METRICS.items():
                if metric.kind is MetricKind.COUNTER and not metric.labels:
                    self._metrics[name].labels(*values)
            for kind in ("load", "save", "expired"):
                self._metrics["failures"].labels(*values, HOST, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            kind = METRICS[name].kind
            for labels, value in values.items():
                metric = self._metrics[name].labels(*engine, *labels)
                if kind is MetricKind.COUNTER:
                    metric.inc(value)
                elif kind is MetricKind.GAUGE:
                    metric.set(value)
                else:
                    for observation in value:
                        metric.observe(observation)


def _options(metric: Metric) -> dict[str, Any]:
    if metric.kind is MetricKind.GAUGE:
        return {"multiprocess_mode": "mostrecent"}
    return {"buckets": metric.buckets} if metric.buckets else {}


def _sum(sample: Sample, name: str, *labels: str) -> float:
    """Over the label values that begin with these."""
    values: dict[Labels, Value] = sample.get(name, {})
    return sum(
        sum(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key[: len(labels)] == labels
    )
