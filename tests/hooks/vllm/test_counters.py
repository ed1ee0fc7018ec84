"""What is counted: nothing twice, nothing below zero, and no hit that is larger than what was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

KINDS = ("", "preempted_")


class Counters:
    """Adds up what vLLM and the scheduler half count, and looks at each step's share."""

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig, self._make = rig, rig.scheduler.make_stats
        rig.scheduler.make_stats = self._look
        self.sums: Counter[str] = Counter()

    def _look(self, *arguments: Any, **more: Any) -> Any:
        stats = self._make(*arguments, **more)
        counts = stats.connector_prefix_cache_stats
        for kind in KINDS:
            queries, hits = getattr(counts, f"{kind}queries"), getattr(counts, f"{kind}hits")
            assert 0 <= hits <= queries
            self.sums.update({f"{kind}queries": queries, f"{kind}hits": hits})
        coordinator = self._rig.connector.scheduler._coordinator
        assert coordinator is not None
        ours = coordinator.take_stats()
        counts = {field.name: getattr(ours, field.name) for field in fields(ours)}
        tables = {name: count for name, count in counts.items() if isinstance(count, dict)}
        assert min(count for name, count in counts.items() if name not in tables) >= 0
        assert all(count > 0 for table in tables.values() for count in table.values())
        assert ours.hit_tokens == sum(ours.hit_tokens_from.values()) <= ours.queried_tokens
        self.sums.update({name: count for name, count in counts.items() if name not in tables})
        return stats


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_a_second_lookup_that_finds_more_is_counted_apart(make_rig: MakeRig, caching: bool, mode: str) -> None:
    rig = make_rig(options={"load_mode": mode}, step_tokens=2 * BLOCK, prefix_caching=caching)
    ids = prompt(10 * BLOCK + 3)
    rig.serve("head", ids[: 2 * BLOCK + 1])
    rig.scheduler.reset_prefix_cache()
    counters = Counters(rig)
    rig.step()
    counters.sums.clear()
    rig.add("a", ids, max_tokens=2 * BLOCK)
    while rig.requests["a"].num_output_tokens < BLOCK + 3:
        rig.step()
    assert (counters.sums["queries"], counters.sums["hits"]) == (len(ids), 2 * BLOCK)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    rig.step()
    assert rig.requests["a"].num_preemptions == 1
    assert (counters.sums["queries"], counters.sums["hits"]) == (len(ids), 2 * BLOCK)
    # What was computed until then, in whole blocks.
    known = len(ids) + BLOCK + 3
    assert counters.sums["preempted_hits"] == (known - 1) // BLOCK * BLOCK
    assert counters.sums["preempted_queries"] <= known
    assert (counters.sums["queried_tokens"], counters.sums["hit_tokens"]) == (len(ids), 2 * BLOCK)
    # Twelve full blocks, of which the pool had two.
    assert counters.sums["saved_blocks"] == (len(ids) + 2 * BLOCK - 1) // BLOCK - 2
    assert_idle(rig)


def test_counts_of_a_crowd_stay_in_bounds(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=20, step_tokens=3 * BLOCK, options={"host_gib": 0.0001})
    counters = Counters(rig)
    for turn in range(6):
        for seed in range(3):
            ids = prompt(4 * BLOCK + turn, seed=(turn + seed) % 5)
            rig.add(f"{turn} {seed}", ids, max_tokens=4 * BLOCK if seed else 1)
        for _ in range(20):
            rig.step()
        rig.scheduler.reset_prefix_cache(reset_running_requests=turn % 3 == 0)
    rig.run()
    rig.step()
    assert min(counters.sums[what] for what in ("hits", "preempted_hits", "saved_blocks", "evicted_chunks")) > 0
    assert_idle(rig, num_blocks=20)
