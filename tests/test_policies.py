from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.policies import LRU, UseOrder


@dataclass(eq=False)
class Thing:
    name: str
    used: int = 0


def things(policy: LRU[Thing], names: str) -> list[Thing]:
    made = [Thing(name) for name in names]
    for thing in made:
        policy.touch(thing)
    return made


def drain(policy: LRU[Thing]) -> str:
    names = ""
    while (thing := policy.pop()) is not None:
        names += thing.name
    return names


def test_the_least_recently_used_goes_first_whatever_the_order_of_adding() -> None:
    policy: LRU[Thing] = LRU()
    a, b, c = things(policy, "abc")
    for thing in (c, a, b):
        policy.add(thing)
    assert drain(policy) == "abc"


def test_a_use_moves_an_item_to_the_end() -> None:
    policy: LRU[Thing] = LRU()
    made = things(policy, "abc")
    for thing in made:
        policy.add(thing)
    policy.touch(made[0])
    assert drain(policy) == "bca"


def test_an_item_keeps_its_place_while_it_is_not_evictable() -> None:
    policy: LRU[Thing] = LRU()
    a, b, c = things(policy, "abc")
    for thing in (a, b, c):
        policy.add(thing)
    policy.discard(a)
    policy.add(a)
    assert drain(policy) == "abc"


def test_only_what_was_added_and_not_discarded_is_evicted_and_once() -> None:
    policy: LRU[Thing] = LRU()
    a, b, c = things(policy, "abc")
    policy.add(a)
    policy.add(a)
    policy.add(b)
    policy.discard(b)
    policy.discard(c)
    assert drain(policy) == "a"
    assert policy.pop() is None


def test_stale_entries_do_not_pile_up() -> None:
    policy: LRU[Thing] = LRU()
    made = things(policy, "abcd")
    for thing in made:
        policy.add(thing)
    for step in range(10_000):
        policy.touch(made[step % 4])
        policy.discard(made[step % 3])
        policy.add(made[step % 3])
    assert len(policy._heap) < 200


def test_adding_an_item_again_does_not_cost_it_its_place_among_those_never_used() -> None:
    order: UseOrder[Thing] = UseOrder()
    a, b = Thing("a"), Thing("b")
    for thing in (a, b, a):
        order.add(thing)
    assert [order.pop(), order.pop(), order.pop()] == [a, b, None]


def test_an_order_follows_the_stamps_that_another_makes() -> None:
    policy: LRU[Thing] = LRU()
    order: UseOrder[Thing] = UseOrder()
    a, b, c = things(policy, "abc")
    for thing in (c, b):
        order.add(thing)
    for thing in (b, a, c):
        policy.touch(thing)
        order.renew(thing)
    assert [order.pop(), order.pop(), order.pop()] == [b, c, None]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["touch", "add", "discard", "pop"]), st.integers(0, 5)), max_size=200))
def test_it_behaves_like_a_list_in_order_of_use(operations: list[tuple[str, int]]) -> None:
    policy: LRU[Thing] = LRU()
    made = things(policy, "abcdef")
    order, evictable = list(made), set[Thing]()
    for operation, number in operations:
        thing = made[number]
        if operation == "touch":
            policy.touch(thing)
            order.remove(thing)
            order.append(thing)
        elif operation == "add":
            policy.add(thing)
            evictable.add(thing)
        elif operation == "discard":
            policy.discard(thing)
            evictable.discard(thing)
        else:
            expected = next((thing for thing in order if thing in evictable), None)
            assert policy.pop() is expected
            evictable -= {expected} if expected else set()
