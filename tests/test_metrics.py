"""Counts add up in any order, no field is left out, and the interval line says what was counted."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.metrics import CacheStats, TierCounts, TierTraffic, TransferStats, interval_line, tiers_line

FIELDS = [field.name for field in dataclasses.fields(TransferStats)]

# Whole numbers, so that sums of floats are exact in every order.
transfer_stats = st.lists(st.integers(0, 1 << 40), min_size=len(FIELDS), max_size=len(FIELDS)).map(
    lambda values: TransferStats(**dict(zip(FIELDS, values, strict=True)))
)


@given(transfer_stats, transfer_stats, transfer_stats)
def test_merging_is_associative_and_commutative_and_has_a_zero(
    a: TransferStats, b: TransferStats, c: TransferStats
) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(TransferStats()) == a


@given(st.lists(transfer_stats, min_size=1, max_size=5))
def test_merging_sums_every_field_and_changes_nothing(many: list[TransferStats]) -> None:
    before = [dataclasses.asdict(one) for one in many]
    total = functools.reduce(TransferStats.merge, many)
    assert dataclasses.asdict(total) == {name: sum(one[name] for one in before) for name in FIELDS}
    assert [dataclasses.asdict(one) for one in many] == before


@pytest.mark.parametrize("name", FIELDS)
def test_any_count_makes_stats_true(name: str) -> None:
    assert TransferStats(**{name: 1})
    assert not TransferStats()


@pytest.mark.parametrize(
    ("gated", "stall", "ratio"), [(0.0, 0.0, None), (4.0, 1.0, 0.75), (4.0, 0.0, 1.0), (4.0, 4.0, 0.0), (4.0, 5.0, 0.0)]
)
def test_overlap_ratio(gated: float, stall: float, ratio: float | None) -> None:
    stats = TransferStats(load_seconds=100.0, gated_load_seconds=gated, stall_seconds=stall)
    assert stats.overlap_ratio == ratio


def test_line_of_a_busy_interval() -> None:
    cache = CacheStats(
        queried_tokens=5000, hit_tokens=4000, saved_blocks=9, dropped_blocks=3, evicted_chunks=2, expired_jobs=1
    )
    moved = TransferStats(
        load_blocks=250,
        load_bytes=2_000_000_000,
        load_seconds=0.1,
        gated_load_seconds=0.08,
        stall_seconds=0.004,
        save_blocks=8,
        save_bytes=64_500_000,
        save_seconds=0.01,
        verified_blocks=258,
    )
    assert interval_line(cache, moved, pool_used=30, pool_slots=64) == (
        "LayerStream: hit 4000/5000 tokens, loaded 2000.0 MB at 20.00 GB/s, saved 64.5 MB at 6.45 GB/s, "
        "overlap 0.950, exposed stall 4.00 ms, pool 30/64 slots, 3 blocks not saved: no room, 2 chunks evicted, "
        "1 jobs expired, 258 blocks verified"
    )


def test_line_of_a_quiet_interval_divides_by_nothing() -> None:
    assert interval_line(CacheStats(), TransferStats(), pool_used=0, pool_slots=64) == (
        "LayerStream: hit 0/0 tokens, loaded 0 B, saved 0 B, overlap -, exposed stall 0.00 ms, pool 0/64 slots"
    )


def test_line_of_bytes_without_a_time_gives_no_rate() -> None:
    line = interval_line(CacheStats(), TransferStats(load_bytes=1_000_000), pool_used=0, pool_slots=1)
    assert "loaded 1.0 MB, saved 0 B" in line


@pytest.mark.parametrize("name", ["dropped_blocks", "evicted_chunks", "expired_jobs"])
def test_each_fault_is_said_alone(name: str) -> None:
    quiet = interval_line(CacheStats(), TransferStats(), pool_used=0, pool_slots=1)
    said = {
        other: interval_line(CacheStats(**{other: 7}), TransferStats(), pool_used=0, pool_slots=1)  # type: ignore[arg-type]
        for other in ("dropped_blocks", "evicted_chunks", "expired_jobs")
    }
    assert said[name].startswith(quiet + ", 7 ")
    assert all(one != two for one, two in itertools.combinations(said.values(), 2))


TIER_FIELDS = [field.name for field in dataclasses.fields(TierTraffic)]
COUNT_FIELDS = [field.name for field in dataclasses.fields(TierCounts)]


@given(
    st.lists(
        st.lists(st.integers(0, 1 << 40), min_size=len(TIER_FIELDS), max_size=len(TIER_FIELDS)), min_size=1, max_size=4
    )
)
def test_traffic_of_tiers_adds_up_field_by_field(many: list[list[int]]) -> None:
    parts = [TierTraffic(**dict(zip(TIER_FIELDS, values, strict=True))) for values in many]
    total = functools.reduce(TierTraffic.merge, parts, TierTraffic())
    assert dataclasses.astuple(total) == tuple(map(sum, zip(*many, strict=True)))


@pytest.mark.parametrize("name", TIER_FIELDS)
def test_any_count_makes_traffic_true(name: str) -> None:
    assert TierTraffic(**{name: 1})
    assert not TierTraffic()


@given(*(st.lists(st.integers(0, 1 << 40), min_size=len(COUNT_FIELDS), max_size=len(COUNT_FIELDS)) for _ in range(2)))
def test_counts_of_tiers_are_told_apart_field_by_field(old: list[int], more: list[int]) -> None:
    before = TierCounts(**dict(zip(COUNT_FIELDS, old, strict=True)))
    after = TierCounts(**{name: a + b for name, a, b in zip(COUNT_FIELDS, old, more, strict=True)})
    assert dataclasses.astuple(after.minus(before)) == tuple(more)
    assert bool(after.minus(before)) == any(more)


def test_line_of_a_busy_interval_of_tiers() -> None:
    traffic = {
        "disk": TierTraffic(
            read_objects=4, read_bytes=64_000_000, read_seconds=0.032, written_objects=1, written_bytes=16_000_000,
            write_seconds=0.016, missing_objects=1, damaged_objects=2, refused_objects=3, read_failures=3,
            write_failures=1,
        ),
        "lmcache": TierTraffic(read_objects=1, read_bytes=1_000_000),
    }  # fmt: skip
    counts = TierCounts(promoted_blocks=80, fell_requests=5, dropped_objects=6, passed_blocks=7)
    assert tiers_line(counts, traffic, ill=["mooncake", "lmcache"]) == (
        "LayerStream tiers: promoted 80 blocks; disk read 64.0 MB at 2.00 GB/s, wrote 16.0 MB at 1.00 GB/s, 1 missing, "
        "2 damaged, 3 refused, 4 failures; lmcache read 1.0 MB, wrote 0 B; 5 requests fell to misses; "
        "6 objects not written; 7 blocks computed instead; not asked at present: mooncake, lmcache"
    )


def test_line_of_a_quiet_interval_of_tiers() -> None:
    assert tiers_line(TierCounts(), {}, ill=[]) == "LayerStream tiers: promoted 0 blocks"
