"""What is counted, and the one line an interval that says it.

Times come from device events; "exposed stall" is the time the compute stream waited at gates, and
overlap ratio = 1 - exposed stall / load time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

HOST = "host"
"""What the host pool is called where tiers are told apart."""
LOAD_MODES = ("layerwise", "whole", "in_graph", "parked")
"""How a load was waited for: at each layer's hook; before the forward, whose hooks do not run; inside a FULL graph; by
its request alone."""


class LoadTimes(NamedTuple):
    """One step's loads of one kind on one rank, which travel together."""

    mode: str
    """One of `LOAD_MODES`."""
    seconds: float
    """In which at least one of their layers travelled."""
    stall_seconds: float | None
    """For which the compute stream waited at their gates; None if nobody can time that, or nothing waits."""


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Counts of one worker half since its last report. Adding two is field by field."""

    load_blocks: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    """Sum over loads of the time in which at least one of their layers travelled."""
    gated_load_seconds: float = 0.0
    """The part of `load_seconds` that gates could expose: loads whose step waited for them layer by layer."""
    stall_seconds: float = 0.0
    """Time the compute stream waited for gated loads."""
    save_blocks: int = 0
    save_bytes: int = 0
    save_seconds: float = 0.0
    """Sum over layers of the time from a save's gather to the end of its copies; waiting for the model not counted."""
    verified_blocks: int = 0
    """Blocks whose bytes were compared because `verify` is on."""

    def merge(self, other: TransferStats) -> TransferStats:
        """Field-wise sum; returns a new object."""
        return TransferStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    @property
    def overlap_ratio(self) -> float | None:
        """1 - stall / load time of gated loads, clipped at 0; None without gated loads."""
        if self.gated_load_seconds <= 0.0:
            return None
        return max(0.0, 1.0 - self.stall_seconds / self.gated_load_seconds)


@dataclass(slots=True, kw_only=True)
class TierTraffic:
    """What one worker half moved from and to one tier since its last report. Adding two is field by field."""

    read_objects: int = 0
    """Objects whose bytes arrived and were found right."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Sum over jobs, checking included."""
    written_objects: int = 0
    """Objects that the tier has taken, or had already."""
    written_bytes: int = 0
    write_seconds: float = 0.0
    """Sum over jobs, checksums included."""
    missing_objects: int = 0
    """Objects that were promised and not there any more."""
    damaged_objects: int = 0
    """Objects that arrived with wrong bytes; they are removed."""
    refused_objects: int = 0
    """Objects that the tier did not take: it is full, or somebody else is writing them."""
    read_failures: int = 0
    """Reading jobs that ended in an error of the tier."""
    write_failures: int = 0
    """Writing jobs that ended in an error of the tier."""

    @property
    def failures(self) -> int:
        """Jobs that ended in an error of the tier."""
        return self.read_failures + self.write_failures

    def merge(self, other: TierTraffic) -> TierTraffic:
        """Field-wise sum; returns a new object."""
        return TierTraffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Counts of the scheduler half over all tiers."""

    promoted_blocks: int = 0
    """Blocks brought from tiers into the pool."""
    fell_requests: int = 0
    """Requests that may have got less than a tier had, because it failed or took too long."""
    dropped_objects: int = 0
    """Objects not written: evicted before their turn, no room in the queue or the tier, or the tier is ill."""
    passed_blocks: int = 0
    """Blocks that a tier has and that were not brought, since computing them is sooner."""

    def minus(self, other: TierCounts) -> TierCounts:
        """Field-wise difference; returns a new object."""
        return TierCounts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Counts of the scheduler half."""

    queried_tokens: int = 0
    """Tokens of prompts that were asked about and not already in vLLM's own cache, counted once per request."""
    hit_tokens: int = 0
    """Tokens that requests were admitted to load."""
    saved_blocks: int = 0
    """Blocks published."""
    dropped_blocks: int = 0
    """Blocks not saved because the pool had no room that could be evicted."""
    evicted_chunks: int = 0
    expired_jobs: int = 0
    """Jobs whose report did not come by the deadline."""
    failed_loads: int = 0
    """Loads that some rank gave up."""
    failed_saves: int = 0
    """Saves that some rank gave up, or whose blocks held no valid KV."""
    hit_tokens_from: dict[str, int] = field(default_factory=dict)
    """`HOST`, or name of the tier that the blocks were brought from for this load -> its part of `hit_tokens`."""
    hit_requests_from: dict[str, int] = field(default_factory=dict)
    """The same for requests; one whose hit has several sources counts for each."""
    decisions: dict[str, int] = field(default_factory=dict)
    """One of `layerstream.decisions.REASONS` -> hits about which it was made."""
    returned_chunks: dict[str, int] = field(default_factory=dict)
    """One of `layerstream.ghosts.SIZES` -> evicted chunks that came back and that a pool so many times larger would
    still have had."""

    def merge(self, other: CacheStats) -> CacheStats:
        """Sum, field by field and entry by entry; returns a new object."""
        return self._with(other, 1)

    def minus(self, other: CacheStats) -> CacheStats:
        """Difference, field by field and entry by entry; entries that are 0 are left out. Returns a new object."""
        return self._with(other, -1)

    def _with(self, other: CacheStats, sign: int) -> CacheStats:
        result = CacheStats()
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                sums = {key: mine.get(key, 0) + sign * theirs.get(key, 0) for key in {**mine, **theirs}}
                setattr(result, each.name, {key: value for key, value in sums.items() if value})
            else:
                setattr(result, each.name, mine + sign * theirs)
        return result

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))


def add_count(counts: dict[str, int], key: str, count: int = 1) -> None:
    """Add to one entry of a table of counts."""
    counts[key] = counts.get(key, 0) + count


def _rate(nbytes: int, seconds: float) -> str:
    if not nbytes:
        return "0 B"
    size = f"{nbytes / 1e6:.1f} MB"
    return f"{size} at {nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else size


def interval_line(cache: CacheStats, moved: TransferStats, *, pool_used: int, pool_slots: int) -> str:
    """The line logged every `log_interval_s` seconds in which something happened."""
    overlap = moved.overlap_ratio
    parts = [
        f"hit {cache.hit_tokens}/{cache.queried_tokens} tokens",
        f"loaded {_rate(moved.load_bytes, moved.load_seconds)}",
        f"saved {_rate(moved.save_bytes, moved.save_seconds)}",
        f"overlap {'-' if overlap is None else f'{overlap:.3f}'}",
        f"exposed stall {moved.stall_seconds * 1e3:.2f} ms",
        f"pool {pool_used}/{pool_slots} slots",
    ]
    for count, what in (
        (cache.dropped_blocks, "blocks not saved: no room"),
        (cache.evicted_chunks, "chunks evicted"),
        (cache.expired_jobs, "jobs expired"),
        (cache.decisions.get("load_part", 0), "hits loaded in part"),
        (cache.decisions.get("recompute", 0), "hits computed instead"),
        (moved.verified_blocks, "blocks verified"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return "LayerStream: " + ", ".join(parts)


def tiers_line(counts: TierCounts, traffic: Mapping[str, TierTraffic], *, ill: Sequence[str]) -> str:
    """The line on tiers logged beside `interval_line`, in intervals in which something happened there.

    Args:
        counts: over all tiers.
        traffic: tier's name -> what its ranks moved.
        ill: names of tiers that are not asked at present.
    """
    parts = [f"promoted {counts.promoted_blocks} blocks"]
    for name, moved in traffic.items():
        part = f"{name} read {_rate(moved.read_bytes, moved.read_seconds)}"
        part += f", wrote {_rate(moved.written_bytes, moved.write_seconds)}"
        for count, what in (
            (moved.missing_objects, "missing"),
            (moved.damaged_objects, "damaged"),
            (moved.refused_objects, "refused"),
            (moved.failures, "failures"),
        ):
            part += f", {count} {what}" if count else ""
        parts.append(part)
    for count, what in (
        (counts.fell_requests, "requests fell to misses"),
        (counts.dropped_objects, "objects not written"),
        (counts.passed_blocks, "blocks computed instead"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if ill:
        parts.append(f"not asked at present: {', '.join(ill)}")
    return "LayerStream tiers: " + "; ".join(parts)
