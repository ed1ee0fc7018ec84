from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.insertion import POLICIES
from layerstream.policies import LRU
from layerstream.replay import BestPool, BlockPool, IndexPool, Pool, next_uses, replay
from layerstream.request_trace import RequestTrace, read_trace

HEAD = Path(__file__).parent / "data" / "conversation_trace_head.jsonl"


def trace_of(prompts: list[list[int]], *, whole: bool = False) -> RequestTrace:
    """Blocks of ten tokens; `whole`: prompts end where their last block does, so that it is never hit."""
    flat = [block for prompt in prompts for block in prompt]
    return RequestTrace(
        block_tokens=10,
        input_tokens=np.array([10 * len(prompt) + (0 if whole else 1) for prompt in prompts], np.int64),
        starts=np.cumsum([0, *(len(prompt) for prompt in prompts)]),
        blocks=np.array(flat, np.int32),
        distinct=len(set(flat)),
    )


def random_prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Prompts that share heads, come back, grow and part."""
    names: dict[tuple[int, ...], int] = {}
    kept: list[tuple[int, ...]] = [()]
    prompts = []
    for _ in range(count):
        words = draw.choice(kept[-12:] if draw.random() < 0.8 else kept)
        if draw.random() < 0.3:
            words = words[: draw.randrange(len(words) + 1)]
        words += tuple(draw.randrange(3) for _ in range(draw.randrange(1, 6)))
        kept.append(words)
        prompts.append([names.setdefault(words[: end + 1], len(names)) for end in range(len(words))])
    return prompts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    slots=st.integers(1, 40),
    name=st.sampled_from(sorted(POLICIES)),
    whole=st.booleans(),
)
def test_the_pool_of_blocks_hits_what_the_products_index_hits(seed: int, slots: int, name: str, whole: bool) -> None:
    trace = trace_of(random_prompts(random.Random(seed), 120), whole=whole)
    fast = replay(trace, BlockPool(slots, POLICIES[name]()))
    assert fast.tolist() == replay(trace, IndexPool(slots, 1, POLICIES[name]())).tolist()


@cache
def head() -> RequestTrace:
    return read_trace(HEAD, block_tokens=512)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("slots", [50, 300, 2000])
def test_the_pool_of_blocks_hits_what_the_products_index_hits_of_a_published_trace(name: str, slots: int) -> None:
    fast = replay(head(), BlockPool(slots, POLICIES[name]()))
    assert fast.sum() > 0
    assert fast.tolist() == replay(head(), IndexPool(slots, 1, POLICIES[name]())).tolist()


class LeastRecent:
    """LRU over single blocks, the deepest of a prompt first, by a list."""

    def __init__(self, slots: int) -> None:
        self.slots, self.held = slots, list[int]()

    def serve(self, blocks: list[int], limit: int) -> int:
        hit = 0
        while hit < limit and blocks[hit] in self.held:
            hit += 1
        kept = [block for block in self.held if block not in blocks]
        self.held = (kept + blocks[::-1])[-self.slots :]
        return hit


@pytest.mark.parametrize("seed", range(5))
def test_under_lru_it_is_lru_over_blocks_for_prompts_that_fit(seed: int) -> None:
    trace = trace_of(random_prompts(random.Random(seed), 400))
    slots = max(len(blocks) for blocks, _ in trace.prompts())
    for more in (0, 5, 60):
        ours = replay(trace, BlockPool(slots + more, LRU()))
        assert ours.tolist() == replay(trace, LeastRecent(slots + more)).tolist()


def test_what_does_not_fit_is_kept_by_halves() -> None:
    pool: Pool = BlockPool(5, LRU())
    prompt = list(range(16))
    assert [pool.serve(prompt, 16), pool.serve(prompt, 16)] == [0, 4]


def test_no_more_is_hit_than_the_limit() -> None:
    pools: list[Pool] = [BlockPool(9, LRU()), IndexPool(9, 1, LRU()), LeastRecent(9)]
    for pool in pools:
        pool.serve([1, 2, 3], 3)
        assert pool.serve([1, 2, 3], 2) == 2


def most_hits(prompts: list[list[int]], slots: int) -> int:
    """By trying every set of heads that a pool could hold after each prompt."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hit = next((end for end, block in enumerate(prompt) if block not in held), len(prompt))
            choices = sorted(held | set(prompt))
            for count in range(min(slots, len(choices)) + 1):
                for kept in map(frozenset, itertools.combinations(choices, count)):
                    after[kept] = max(after.get(kept, 0), hits + hit)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_one(seed: int) -> None:
    draw = random.Random(seed)
    tree = [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5], [4, 5, 6], [4, 7]]
    prompts = [draw.choice(tree) for _ in range(9)]
    trace = trace_of(prompts)
    for slots in (1, 2, 3):
        assert replay(trace, BestPool(slots, next_uses(trace))).sum() == most_hits(prompts, slots)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), slots=st.integers(1, 40), whole=st.booleans())
def test_no_policy_hits_more_than_the_optimum(seed: int, slots: int, whole: bool) -> None:
    trace = trace_of(random_prompts(random.Random(seed), 120), whole=whole)
    best = replay(trace, BestPool(slots, next_uses(trace))).sum()
    for make in POLICIES.values():
        assert replay(trace, BlockPool(slots, make())).sum() <= best


def test_the_optimum_forgets_what_is_not_asked_for_again() -> None:
    trace = trace_of([[number] for number in range(5000)])
    pool = BestPool(10, next_uses(trace))
    replay(trace, pool)
    assert (len(pool._held), len(pool._heap)) == (0, 0)


def test_the_next_use_is_the_next_request_that_can_hit_the_block() -> None:
    trace = trace_of([[0, 1], [0], [0, 1], [0, 1, 2]], whole=True)
    assert next_uses(trace).tolist() == [2, 3, 2, 3, 3, -1, -1, -1]


def test_progress_is_told_of_every_request() -> None:
    said: list[int] = []
    replay(trace_of([[number] for number in range(1000)]), BlockPool(10, LRU()), said.append)
    assert sum(said) == 1000
    assert len(said) > 2
