"""Every metric that is exported: its name, kind, labels, and what it says. docs/metrics.md is made from this table.

Names follow Prometheus' conventions (base units; counters end in `_total`, which Prometheus' client adds) behind the
prefix by which vLLM recognizes metrics as its own: it unregisters `vllm:*` where it makes engines one after another in
one process, and metrics under another prefix would be registered twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from layerstream.decisions import REASONS
from layerstream.ghosts import SIZES
from layerstream.metrics import LOAD_MODES

PREFIX = "vllm:layerstream_"


class MetricKind(enum.Enum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported metric."""

    name: str
    """Without `PREFIX`, and without the `_total` of counters."""
    kind: MetricKind
    text: str
    """What it says, in one line."""
    labels: tuple[str, ...] = ()
    """Beside those that vLLM gives: `model_name` and `engine`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    @property
    def full_name(self) -> str:
        """As it is registered."""
        return PREFIX + self.name

    @property
    def exported_name(self) -> str:
        """As it is scraped; a histogram's series add `_bucket`, `_sum` and `_count`."""
        return self.full_name + ("_total" if self.kind is MetricKind.COUNTER else "")


SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LABELS = {
    "tier": "`host` for the host pool, else the tier's name: its type, with a number from the second of its kind on",
    "direction": "`load` (host to GPU) or `save` (GPU to host); of a tier `read` or `write`",
    "mode": f"how loads are waited for: {', '.join(f'`{each}`' for each in LOAD_MODES)}; `whole` before the forward, "
    "because it replays a FULL graph",
    "reason": f"{', '.join(f'`{each}`' for each in REASONS)}; `fixed` where nothing is weighed",
    "kind": "of jobs: `load`, `parked_load`, `save`, `promote` (tier to host), `demote` (host to tier); of failures: "
    "`load`, `save`, `expired` (a rank did not answer in time), `read`, `write`, `missing` (promised and gone), "
    "`damaged` (wrong bytes), `late` (a lookup that was not answered in time)",
    "size": f"size of a pool, in pools of the present size: {', '.join(f'`{each}`' for each in SIZES)}",
}
"""What the labels say."""


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, text=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, text=text, labels=labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.HISTOGRAM, text=text, labels=labels, buckets=SECONDS)


METRICS = {
    metric.name: metric
    for metric in (
        _gauge("working", "1 while blocks are loaded and saved; 0 after a failure that needs a restart"),
        _gauge("block_tokens", "tokens of one block"),
        _counter("queried_tokens", "prompt tokens looked up: those that vLLM's own cache did not have"),
        _counter("hit_tokens", "tokens that requests were admitted to load, by where they were found", "tier"),
        _counter("hit_requests", "requests admitted to load; one with several sources counts for each", "tier"),
        _counter("decisions", "hits, by what was decided about them", "reason"),
        _counter("transfer_bytes", "bytes moved, summed over ranks", "direction"),
        _counter("transfer_blocks", "blocks moved, summed over ranks", "direction"),
        _counter(
            "transfer_seconds",
            "loads: time in which any layer travelled; saves: time of their copies, layer by layer; summed over ranks",
            "direction",
        ),
        _histogram("load_seconds", "time of the loads of one step on one rank", "mode"),
        _histogram(
            "load_stall_seconds",
            "time that the model waited for them at the layers' gates, where it can be measured",
            "mode",
        ),
        _counter("saved_blocks", "blocks that became hits after they were computed"),
        _counter("dropped_save_blocks", "blocks that were not saved: the pool had no room that could be evicted"),
        _counter("evicted_chunks", "chunks of the host pool that made room for others"),
        _counter(
            "returned_chunks",
            "chunks that came back after they were evicted, by the pool that would still have had them",
            "size",
        ),
        _counter("verified_blocks", "blocks compared by the option `verify`, summed over ranks"),
        _counter("failures", "what went wrong; each costs a recompute, or is in the log as an error", "tier", "kind"),
        _gauge("pool_slots", "slots of the host pool, one chunk each"),
        _gauge("pool_used_slots", "slots that are not free"),
        _gauge("pool_pinned_slots", "slots that are read at this moment, or kept for requests that wait"),
        _gauge("pool_bytes", "bytes of the host pools of all ranks"),
        _gauge("jobs", "jobs under way", "kind"),
        _gauge("overdue_jobs", "jobs that were given up and that some rank has not answered for"),
        _gauge("waiting_requests", "requests that wait for tiers, or were looked up there and wait to be scheduled"),
        _counter("promoted_blocks", "blocks brought from tiers into the host pool"),
        _counter("fallen_requests", "requests that may have got less than a tier had: it failed or took too long"),
        _counter("tier_bytes", "bytes moved, summed over ranks", "tier", "direction"),
        _counter("tier_objects", "objects moved, summed over ranks", "tier", "direction"),
        _counter("tier_seconds", "time of the moving, checksums included, summed over jobs", "tier", "direction"),
        _counter("tier_lookups", "lookups wanted", "tier"),
        _counter("tier_found_objects", "objects that lookups found", "tier"),
        _counter(
            "tier_dropped_objects",
            "objects not written: evicted before their turn, no room in the queue or the tier, or refused by it",
            "tier",
        ),
        _gauge("tier_healthy", "1 while the tier is used; 0 after failures, until it answers again", "tier"),
        _gauge("tier_queue_objects", "objects that wait to be written", "tier"),
        _gauge("tier_used_bytes", "bytes in the tier, as it says", "tier"),
        _gauge("tier_capacity_bytes", "bytes that fit into the tier, as it says", "tier"),
    )
}
"""By name, in the order in which they are documented."""


def reference() -> str:
    """The tables of docs/metrics.md, in Markdown."""
    lines = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exported_name}` | {metric.kind.value} | {labels} | {metric.text} |")
    lines += ["", "| label | values |", "|---|---|"]
    lines += [f"| `{label}` | {text} |" for label, text in LABELS.items()]
    return "\n".join(lines) + "\n"
