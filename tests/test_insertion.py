from __future__ import annotations

from dataclasses import dataclass

import pytest

from layerstream.insertion import PARTS, POLICIES, TRIAL, AdaptiveInsertion
from layerstream.policies import LRU
from layerstream.replay import Block, BlockPool


@dataclass(eq=False)
class Thing:
    name: str
    used: int = 0
    probation: bool = False


def policy_of(slots: int, part: float = 1.0) -> AdaptiveInsertion[Thing]:
    policy: AdaptiveInsertion[Thing] = AdaptiveInsertion()
    policy.resize(slots)
    policy.part = part
    # What these tests say of parts is not to be overruled by what the traffic promises.
    policy._choose_at = 1 << 60
    return policy


def bring(policy: AdaptiveInsertion[Thing], name: str, continues: Thing | None = None) -> Thing:
    thing = Thing(name)
    policy.enter(thing, continues)
    policy.fill(thing)
    policy.add(thing)
    return thing


def drain(policy: AdaptiveInsertion[Thing]) -> str:
    names = ""
    while (thing := policy.pop()) is not None:
        names += thing.name
    return names


def test_the_names_of_the_option_make_their_policies() -> None:
    assert {name: type(make()) for name, make in POLICIES.items()} == {"adaptive": AdaptiveInsertion, "lru": LRU}


def test_what_was_not_used_again_goes_in_the_order_in_which_it_came() -> None:
    policy = policy_of(100)
    for name in "abc":
        bring(policy, name)
    assert drain(policy) == "abc"


def test_what_was_used_again_outlives_one_filling_of_the_pool_and_no_more() -> None:
    policy = policy_of(10)
    used = bring(policy, "u")
    policy.touch(used)
    for name in "abcdefghi":
        bring(policy, name)
    policy.discard(used)
    policy.add(used)
    late = [bring(policy, name) for name in "xyz"]
    assert late
    assert drain(policy) == "abcdefghiuxyz"


@pytest.mark.parametrize(("part", "kept"), [(1.0, "abcdefgh"), (0.5, "bdfh"), (0.25, "dh"), (0.125, "h")])
def test_a_part_of_the_new_prompts_is_kept_and_the_others_are_on_probation(part: float, kept: str) -> None:
    policy = policy_of(100, part)
    things = [bring(policy, name) for name in "abcdefgh"]
    assert "".join(thing.name for thing in things if not thing.probation) == kept
    early = "".join(thing.name for thing in things if thing.probation)
    assert drain(policy) == early + kept


def test_probation_lasts_while_a_tenth_of_the_pool_is_filled() -> None:
    policy = policy_of(100)
    old = [bring(policy, f"old {number} ") for number in range(100)]
    policy.part = PARTS[-1]
    tried = bring(policy, "tried")
    order = []
    while (thing := policy.pop()) is not None:
        order.append(thing)
    assert order.index(tried) == pytest.approx(TRIAL * len(old), abs=1)


def test_what_is_appended_to_a_prompt_shares_its_fate() -> None:
    policy = policy_of(100, 0.5)
    tried, kept = bring(policy, "t"), bring(policy, "k")
    assert [bring(policy, "x", tried).probation, bring(policy, "y", kept).probation] == [True, False]


def test_a_use_ends_probation() -> None:
    policy = policy_of(100, 0.5)
    tried = bring(policy, "t")
    policy.touch(tried)
    assert not tried.probation
    assert not bring(policy, "x", tried).probation


def test_writing_on_does_not_take_back_what_a_use_earned() -> None:
    policy = policy_of(100)
    thing = bring(policy, "t")
    policy.touch(thing)
    stamp = thing.used
    policy.fill(thing)
    assert thing.used == stamp


def cycle(pool: BlockPool, prompts: int, blocks: int, rounds: int) -> list[int]:
    """Blocks hit in each round over prompts that all come back in the same order."""
    return [
        sum(pool.serve([prompt * blocks + block for block in range(blocks)], blocks) for prompt in range(prompts))
        for _ in range(rounds)
    ]


def test_prompts_that_come_back_too_late_for_all_of_them_are_kept_in_part() -> None:
    lru: LRU[Block] = LRU()
    assert cycle(BlockPool(100, lru), prompts=40, blocks=10, rounds=30)[-1] == 0
    adaptive: AdaptiveInsertion[Block] = AdaptiveInsertion()
    hits = cycle(BlockPool(100, adaptive), prompts=40, blocks=10, rounds=30)
    assert adaptive.part < 1
    # Nobody hits more of 400 blocks that come in turn than a pool of 100 holds.
    assert 50 <= sum(hits[-5:]) / 5 <= 100


def test_prompts_that_all_come_back_in_time_are_all_kept() -> None:
    adaptive: AdaptiveInsertion[Block] = AdaptiveInsertion()
    hits = cycle(BlockPool(400, adaptive), prompts=38, blocks=10, rounds=20)
    assert adaptive.part == 1
    assert hits[1:] == [380] * 19


def test_the_part_follows_the_traffic_back() -> None:
    adaptive: AdaptiveInsertion[Block] = AdaptiveInsertion()
    pool = BlockPool(100, adaptive)
    cycle(pool, prompts=40, blocks=10, rounds=30)
    assert adaptive.part < 1
    fresh = 1_000_000
    for _ in range(600):
        blocks = list(range(fresh, fresh + 10))
        fresh += 10
        for _ in range(3):
            pool.serve(blocks, 10)
    assert adaptive.part == 1


def test_the_parts_are_in_falling_order_from_all() -> None:
    assert PARTS[0] == 1
    assert list(PARTS) == sorted(PARTS, reverse=True)


def test_a_part_promises_what_comes_back_soon_and_its_share_of_what_comes_back_while_it_is_kept() -> None:
    policy = policy_of(1000)
    soon, late = [f"soon {block}" for block in range(8)], [f"late {block}" for block in range(32)]
    policy.see(late)
    policy._ages.filled += 1300
    policy.see(soon)
    policy.see(soon)
    policy.see(late)
    assert [policy._promise(part) for part in (1.0, 0.5, 0.25)] == [8, 8 + 32 / 2, 8 + 32 / 4]


def test_what_has_no_stamp_goes_before_all_that_has_one() -> None:
    policy = policy_of(1000, PARTS[-1])
    bring(policy, "early")
    bare = Thing("bare ")
    policy.add(bare)
    assert drain(policy) == "bare early"
