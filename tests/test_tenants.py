from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.policies import LRU
from layerstream.tenants import Tenants


@dataclass(eq=False)
class Thing:
    name: str
    tenant: str | None
    used: int = 0


def things(tenants: Tenants[Thing], names: str) -> list[Thing]:
    """Evictable items, the oldest first; upper and lower case are two tenants."""
    made = []
    for name in names:
        thing = Thing(name, "upper" if name.isupper() else None)
        tenants.take(thing.tenant, 1)
        tenants.touch(thing)
        tenants.add(thing)
        made.append(thing)
    return made


def drain(tenants: Tenants[Thing]) -> str:
    names = ""
    while (thing := tenants.pop()) is not None:
        names += thing.name
    return names


def drain_of(tenants: Tenants[Thing], tenant: str | None) -> str:
    names = ""
    while (thing := tenants.pop_of(tenant)) is not None:
        names += thing.name
    return names


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.001, 2, math.nan, math.inf])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Tenants[Thing](LRU(), share)


@pytest.mark.parametrize(
    ("share", "slots", "limit"),
    [(0.5, 10, 5), (0.5, 11, 5), (1, 7, 7), (0.1, 19, 1), (0.01, 19, 1), (0.5, 0, 1), (1e-9, 1_000_000, 1)],
)
def test_a_share_is_rounded_down_to_whole_slots_but_never_to_none(share: float, slots: int, limit: int) -> None:
    assert Tenants[Thing](LRU(), share).limit(slots) == limit


def test_slots_are_counted_per_tenant_and_nothing_is_kept_of_a_tenant_without_any() -> None:
    tenants = Tenants[Thing](LRU(), 0.5)
    tenants.take("a", 2)
    tenants.take(None, 1)
    tenants.take("", 3)
    tenants.take("b", 0)
    assert [tenants.held(tenant) for tenant in ("a", None, "", "b", "c")] == [2, 1, 3, 0, 0]
    for tenant in ("a", None, "", "a", "", ""):
        tenants.give(tenant)
    assert not tenants._accounts


def test_the_oldest_goes_first_over_all_tenants_and_within_one() -> None:
    tenants = Tenants[Thing](LRU(), 0.5)
    things(tenants, "aBcDe")
    assert drain_of(tenants, "upper") == "BD"
    assert drain(tenants) == "ace"
    things(tenants, "aBcDe")
    assert drain(tenants) == "aBcDe"
    assert drain_of(tenants, "upper") == drain_of(tenants, None) == drain_of(tenants, "nobody") == ""


def test_a_use_moves_an_item_to_the_end_of_both_orders() -> None:
    tenants = Tenants[Thing](LRU(), 0.5)
    made = things(tenants, "aBcD")
    tenants.touch(made[1])
    tenants.touch(made[0])
    assert drain_of(tenants, "upper") == "DB"
    assert drain(tenants) == "ca"


def test_stale_entries_do_not_pile_up_in_any_order() -> None:
    policy = LRU[Thing]()
    tenants = Tenants[Thing](policy, 0.5)
    made = things(tenants, "aBcD")
    for step in range(4_000):
        tenants.touch(made[step % 4])
        tenants.discard(made[step % 3])
        tenants.add(made[step % 3])
        if step % 5 == 0 and (thing := tenants.pop()) is not None:
            tenants.add(thing)
        if step % 7 == 0 and (thing := tenants.pop_of("upper")) is not None:
            tenants.add(thing)
    assert len(policy._heap) < 200
    assert all(len(account.idle._heap) < 200 for account in tenants._accounts.values())


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["touch", "add", "discard", "pop", "upper", "lower"]), st.integers(0, 5)),
        max_size=200,
    )
)
def test_it_behaves_like_one_list_in_order_of_use(operations: list[tuple[str, int]]) -> None:
    tenants = Tenants[Thing](LRU(), 0.5)
    made = things(tenants, "aBcDeF")
    order, evictable = list(made), set(made)
    for operation, number in operations:
        thing = made[number]
        if operation == "touch":
            tenants.touch(thing)
            order.remove(thing)
            order.append(thing)
        elif operation == "add":
            tenants.add(thing)
            evictable.add(thing)
        elif operation == "discard":
            tenants.discard(thing)
            evictable.discard(thing)
        else:
            names = {"pop": (None, "upper"), "upper": ("upper",), "lower": (None,)}[operation]
            expected = next((thing for thing in order if thing in evictable and thing.tenant in names), None)
            popped = tenants.pop() if operation == "pop" else tenants.pop_of(names[0])
            assert popped is expected
            evictable -= {expected} if expected else set()


def test_an_item_that_is_filled_counts_as_used_among_its_tenants_too() -> None:
    tenants: Tenants[Thing] = Tenants(LRU(), 1.0)
    made = things(tenants, "abc")
    tenants.fill(made[0])
    assert drain_of(tenants, None) == "bca"


def test_the_policy_behind_shares_is_told_of_everything() -> None:
    told: list[tuple[object, ...]] = []

    class Told(LRU[Thing]):
        def resize(self, slots: int) -> None:
            told.append((slots,))

        def see(self, hashes: Sequence[Hashable]) -> None:
            told.append(tuple(hashes))

        def enter(self, item: Thing, continues: Thing | None) -> None:
            told.append((item, continues))

    tenants: Tenants[Thing] = Tenants(Told(), 1.0)
    one, two = Thing("one", None), Thing("two", None)
    tenants.resize(7)
    tenants.see([b"x", b"y"])
    tenants.enter(one, None)
    tenants.enter(two, one)
    assert told == [(7,), (b"x", b"y"), (one, None), (two, one)]
