"""What the metrics say (`layerstream.metric_table`) since they were last asked: from the counts of the scheduler half.

Ranks send their counts with their reports, so all counts are in one place, and whoever takes them here takes them from
nobody else: the log's lines count for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from layerstream.jobs import JobKind
from layerstream.metric_table import METRICS, MetricKind
from layerstream.metrics import HOST, CacheStats, TierCounts, TierTraffic, TransferStats

if TYPE_CHECKING:
    from layerstream.coordinator import Coordinator
    from layerstream.jobs import Report
    from layerstream.tiering import Tiering

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of `Metric.labels`."""
Value = float | list[float]
"""What a counter grew by, what a gauge is, or a histogram's new observations."""
Sample = dict[str, dict[Labels, Value]]
"""Name of a metric -> labels -> value. Counters that did not grow are left out."""


class Exporter:
    """Args:
    coordinator: of the engine.
    working: whether blocks are loaded and saved.
    """

    def __init__(self, coordinator: Coordinator, working: Callable[[], bool]) -> None:
        self.pool_slot_bytes = 0
        """Bytes of a slot of the host pool, over all pools."""
        self.block_tokens = 0
        self._coordinator = coordinator
        self._working = working
        self._moved = TransferStats()
        self._traffic: dict[int, TierTraffic] = {}
        self._loads: dict[str, dict[Labels, Value]] = {}
        self._reported = False
        """Whether ranks have moved anything since the last sample."""
        self._told = CacheStats()
        self._told_tiers: dict[int, tuple[int, int, int, int]] = {}
        self._told_counts = TierCounts()
        self._told_gauges: tuple[float | None, ...] = ()

    def add(self, report: Report) -> None:
        """Ranks have moved something."""
        self._moved = self._moved.merge(report.stats)
        for place, traffic in report.tiers.items():
            self._traffic[place] = traffic.merge(self._traffic.get(place, TierTraffic()))
        for mode, seconds, stall in report.loads:
            _observe(self._loads, "load_seconds", seconds, mode)
            if stall is not None:
                _observe(self._loads, "load_stall_seconds", stall, mode)
        self._reported = True

    def take(self) -> Sample | None:
        """What was counted since the last call, and all gauges; None if nothing has changed."""
        coordinator = self._coordinator
        tiering, cache = coordinator.tiering, coordinator.stats
        gauges = self._gauges(tiering)
        if not self._reported and cache == self._told and gauges == self._told_gauges and not self._asked(tiering):
            return None
        sample, self._loads = self._loads, {}
        self._reported, self._told_gauges = False, gauges
        self._set_gauges(sample, gauges, tiering)
        since = cache.minus(self._told)
        self._told = self._told.merge(since)
        self._count_cache(sample, since)
        self._count_transfers(sample)
        if tiering is not None:
            self._count_tiers(sample, tiering)
        return sample

    def _gauges(self, tiering: Tiering | None) -> tuple[float | None, ...]:
        """In the order in which `_set_gauges` takes them."""
        coordinator = self._coordinator
        jobs = coordinator.jobs_in_flight
        gauges: list[float | None] = [
            self._working(), self.block_tokens, coordinator.pool_slots, coordinator.pool_used, coordinator.pool_pinned,
            coordinator.overdue_jobs, jobs[JobKind.LOAD], jobs[JobKind.PARKED_LOAD], jobs[JobKind.SAVE],
        ]  # fmt: skip
        if tiering is not None:
            moves = tiering.jobs_in_flight
            gauges += (tiering.promotions.waiting_requests, moves[JobKind.PROMOTE], moves[JobKind.DEMOTE])
            waiting = {queue.tier.place: queue.waiting_objects for queue in tiering.demotions.queues}
            for client in tiering.clients:
                usage = client.last_usage
                gauges += (
                    client.well and not tiering.stopped,
                    waiting.get(client.place, 0),
                    None if usage is None else usage.used_bytes,
                    None if usage is None else usage.capacity_bytes,
                )
        return tuple(gauges)

    def _set_gauges(self, sample: Sample, gauges: tuple[float | None, ...], tiering: Tiering | None) -> None:
        values = iter(gauges)
        for name in ("working", "block_tokens", "pool_slots", "pool_used_slots", "pool_pinned_slots", "overdue_jobs"):
            _set(sample, name, next(values))
        _set(sample, "pool_bytes", self._coordinator.pool_slots * self.pool_slot_bytes)
        for kind in (JobKind.LOAD, JobKind.PARKED_LOAD, JobKind.SAVE):
            _set(sample, "jobs", next(values), kind.name.lower())
        if tiering is None:
            return
        _set(sample, "waiting_requests", next(values))
        for kind in (JobKind.PROMOTE, JobKind.DEMOTE):
            _set(sample, "jobs", next(values), kind.name.lower())
        for client in tiering.clients:
            client.usage()
            for name in ("tier_healthy", "tier_queue_objects", "tier_used_bytes", "tier_capacity_bytes"):
                _set(sample, name, next(values), client.name)

    def _count_cache(self, sample: Sample, cache: CacheStats) -> None:
        _count(sample, "queried_tokens", cache.queried_tokens)
        for name, counts in (
            ("hit_tokens", cache.hit_tokens_from),
            ("hit_requests", cache.hit_requests_from),
            ("decisions", cache.decisions),
            ("returned_chunks", cache.returned_chunks),
        ):
            for label, count in counts.items():
                _count(sample, name, count, label)
        _count(sample, "saved_blocks", cache.saved_blocks)
        _count(sample, "dropped_save_blocks", cache.dropped_blocks)
        _count(sample, "evicted_chunks", cache.evicted_chunks)
        for kind, count in (
            ("load", cache.failed_loads),
            ("save", cache.failed_saves),
            ("expired", cache.expired_jobs),
        ):
            _count(sample, "failures", count, HOST, kind)

    def _count_transfers(self, sample: Sample) -> None:
        moved, self._moved = self._moved, TransferStats()
        for direction, blocks, nbytes, seconds in (
            ("load", moved.load_blocks, moved.load_bytes, moved.load_seconds),
            ("save", moved.save_blocks, moved.save_bytes, moved.save_seconds),
        ):
            _count(sample, "transfer_blocks", blocks, direction)
            _count(sample, "transfer_bytes", nbytes, direction)
            _count(sample, "transfer_seconds", seconds, direction)
        _count(sample, "verified_blocks", moved.verified_blocks)

    def _asked(self, tiering: Tiering | None) -> bool:
        """Whether tiers were asked something, or something about them counted, that was not told yet."""
        return tiering is not None and (
            tiering.counts() != self._told_counts or self._asked_of(tiering) != self._told_tiers
        )

    def _asked_of(self, tiering: Tiering) -> dict[int, tuple[int, int, int, int]]:
        dropped = {queue.tier.place: queue.dropped_objects for queue in tiering.demotions.queues}
        return {
            tier.place: (
                tier.stats.lookups, tier.stats.found_objects, tier.stats.late_answers, dropped.get(tier.place, 0)
            )
            for tier in tiering.clients
        }  # fmt: skip

    def _count_tiers(self, sample: Sample, tiering: Tiering) -> None:
        counts = tiering.counts()
        since, self._told_counts = counts.minus(self._told_counts), counts
        _count(sample, "promoted_blocks", since.promoted_blocks)
        _count(sample, "fallen_requests", since.fell_requests)
        # Tiers count in threads of their own: what is counted here must be what is remembered as told.
        asked, before = self._asked_of(tiering), self._told_tiers
        self._told_tiers = asked
        for tier in tiering.clients:
            old = before.get(tier.place, (0, 0, 0, 0))
            lookups, found, late, dropped = (new - past for new, past in zip(asked[tier.place], old, strict=True))
            _count(sample, "tier_lookups", lookups, tier.name)
            _count(sample, "tier_found_objects", found, tier.name)
            _count(sample, "tier_dropped_objects", dropped, tier.name)
            _count(sample, "failures", late, tier.name, "late")
        traffic, self._traffic = self._traffic, {}
        for place, moved in traffic.items():
            self._count_traffic(sample, tiering.clients[place].name, moved)

    def _count_traffic(self, sample: Sample, tier: str, moved: TierTraffic) -> None:
        for direction, objects, nbytes, seconds in (
            ("read", moved.read_objects, moved.read_bytes, moved.read_seconds),
            ("write", moved.written_objects, moved.written_bytes, moved.write_seconds),
        ):
            _count(sample, "tier_objects", objects, tier, direction)
            _count(sample, "tier_bytes", nbytes, tier, direction)
            _count(sample, "tier_seconds", seconds, tier, direction)
        for kind, count in (
            ("read", moved.read_failures),
            ("write", moved.write_failures),
            ("missing", moved.missing_objects),
            ("damaged", moved.damaged_objects),
        ):
            _count(sample, "failures", count, tier, kind)


def add_samples(one: Mapping[str, Mapping[Labels, Value]], other: Mapping[str, Mapping[Labels, Value]]) -> Sample:
    """An earlier and a later sample as one: counters add up, gauges are the later ones, observations follow each
    other. Changes neither."""
    total: Sample = {name: dict(values) for name, values in one.items()}
    for name, values in other.items():
        mine, kind = total.setdefault(name, {}), METRICS[name].kind
        for labels, value in values.items():
            before = mine.get(labels)
            if before is None or kind is MetricKind.GAUGE:
                mine[labels] = value
            else:
                # Numbers add up, and lists follow each other.
                mine[labels] = before + value  # type: ignore[operator]
    return total


def _count(sample: Sample, name: str, value: float, *labels: str) -> None:
    if value:
        sample.setdefault(name, {})[labels] = value


def _set(sample: Sample, name: str, value: float | None, *labels: str) -> None:
    if value is not None:
        sample.setdefault(name, {})[labels] = float(value)


def _observe(sample: Sample, name: str, value: float, *labels: str) -> None:
    observations = sample.setdefault(name, {}).setdefault(labels, [])
    assert isinstance(observations, list)
    observations.append(value)
