from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.index import PrefixIndex, Span


def chain(blocks: Iterable[object]) -> list[bytes]:
    """Block hashes of a prompt, each over its block and the hash before it."""
    hashes = [b"start"]
    for block in blocks:
        hashes.append(hashlib.sha256(hashes[-1] + repr(block).encode()).digest())
    return hashes[1:]


def save(index: PrefixIndex, hashes: Sequence[bytes], tenant: str | None) -> list[Span]:
    spans = index.reserve(hashes, index.known(hashes, 0, len(hashes)), len(hashes), tenant=tenant)
    assert spans is not None
    index.publish(spans)
    return spans


def kept(index: PrefixIndex, prompts: Iterable[Sequence[bytes]]) -> list[int]:
    return [index.match(prompt, len(prompt)) for prompt in prompts]


def held(index: PrefixIndex, tenant: str | None) -> int:
    assert index._tenants is not None
    return index._tenants.held(tenant)


def test_a_tenant_at_its_share_makes_room_among_its_own_though_others_are_older() -> None:
    index = PrefixIndex(slots=6, chunk_blocks=1, tenant_share=0.5)
    other, mine = [chain([("o", at)]) for at in range(3)], [chain([("m", at)]) for at in range(5)]
    for prompt in other:
        save(index, prompt, "other")
    for prompt in mine:
        save(index, prompt, "me")
    assert kept(index, other) == [1, 1, 1]
    assert kept(index, mine) == [0, 0, 1, 1, 1]
    assert index.evicted == 2


def test_a_share_holds_while_the_pool_has_free_slots() -> None:
    index = PrefixIndex(slots=10, chunk_blocks=2, tenant_share=0.25)
    prompts = [chain([at, "x"]) for at in range(4)]
    for prompt in prompts:
        save(index, prompt, "me")
    assert index.used == index.tenant_slots == 2
    assert kept(index, prompts) == [0, 0, 2, 2]


def test_within_its_share_a_tenant_evicts_whatever_is_oldest() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.75)
    first, theirs, mine = chain("m"), [chain("ab"[at]) for at in range(2)], chain("x")
    save(index, first, "me")
    for prompt in theirs:
        save(index, prompt, "other")
    save(index, mine, "me")
    index.touch(first, 1)
    save(index, chain("y"), "me")
    assert kept(index, [first, *theirs, mine]) == [1, 0, 1, 1]


def test_what_goes_beyond_the_share_is_the_tenants_and_the_rest_is_the_oldest_of_all() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.5)
    theirs, mine = [chain("abc"[at]) for at in range(3)], chain("m")
    for prompt in theirs:
        save(index, prompt, f"of {prompt!r}")
    save(index, mine, "me")
    save(index, chain(["x", "y"]), "me")
    assert kept(index, [*theirs, mine]) == [0, 1, 1, 0]


def test_requests_without_a_salt_are_one_tenant() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.5)
    prompts = [chain([at]) for at in range(3)]
    for prompt in prompts:
        spans = index.reserve(prompt, 0, 1)
        assert spans is not None
        index.publish(spans)
    assert kept(index, prompts) == [0, 1, 1]
    assert held(index, None) == 2


def test_more_than_the_share_is_refused_and_nothing_is_evicted_for_it() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=1, tenant_share=0.5)
    mine = chain(range(4))
    save(index, mine, "me")
    state = pickle.dumps(index)
    assert index.reserve(chain("abcde"), 0, 5, tenant="me") is None
    assert pickle.dumps(index) == state, "what can never fit is refused without a look at what might go"
    save(index, chain("abcd"), "me")
    assert index.evicted == 4


def test_a_share_in_use_is_refused_more_though_slots_are_free_and_changes_nothing() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=1, tenant_share=0.375)
    pinned, idle = chain("pq"), chain("i")
    index.pin(save(index, pinned, "me"))
    save(index, idle, "me")
    assert index.reserve(chain("xy"), 0, 2, tenant="me") is None
    assert kept(index, [pinned, idle]) == [2, 1] and index.evicted == 0
    save(index, chain("x"), "me")
    assert kept(index, [pinned, idle]) == [2, 0]


def test_where_the_share_has_room_and_the_pool_has_not_own_chunks_stay_too() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.5)
    idle, theirs = chain("i"), [chain("ab"), chain("c")]
    save(index, idle, "me")
    for tenant, prompt in zip(("b", "c"), theirs, strict=True):
        index.pin(save(index, prompt, tenant))
    assert index.reserve(chain("xy"), 0, 2, tenant="me") is None
    assert kept(index, [idle]) == [1] and index.evicted == 0 and held(index, "me") == 1


def test_a_tenant_gets_to_its_share_however_full_the_others_made_the_pool() -> None:
    index = PrefixIndex(slots=12, chunk_blocks=1, tenant_share=0.25)
    for round_ in range(3):
        for tenant in "abcdef":
            save(index, chain([tenant, round_]), tenant)
    for block in range(3):
        save(index, chain(["late", *range(block)]), "late")
    assert held(index, "late") == index.tenant_slots == 3
    assert index.match(chain(["late", 0, 1]), 3) == 3


def test_a_slot_counts_for_its_tenant_until_no_transfer_can_touch_it() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.5)
    lost = index.reserve(chain("ab"), 0, 2, tenant="me")
    assert lost is not None
    index.abandon(lost)
    assert index.chunks == 0 and held(index, "me") == index.used == 2
    assert index.reserve(chain("x"), 0, 1, tenant="me") is None
    save(index, chain("x"), "other")
    index.retire(lost[:1])
    save(index, chain("x2"), "other")
    save(index, chain("m"), "me")
    assert held(index, "me") == 2
    index.retire(lost[1:])
    assert held(index, "me") == 1


def test_clearing_gives_back_what_nobody_uses() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=1, tenant_share=0.5)
    pinned = save(index, chain("ab"), "me")
    index.pin(pinned)
    save(index, chain("xy"), "me")
    save(index, chain("z"), None)
    index.clear()
    assert (held(index, "me"), held(index, None)) == (2, 0)
    assert index.reserve(chain("cde"), 0, 3, tenant="me") is None
    index.unpin(pinned)
    assert held(index, "me") == 0
    save(index, chain("cdef"), "me")


def test_shares_grow_with_the_pool() -> None:
    index = PrefixIndex(slots=0, chunk_blocks=1, tenant_share=0.5)
    prompts = [chain([at]) for at in range(6)]
    assert index.tenant_slots == 1
    assert index.reserve(prompts[0], 0, 1, tenant="me") is None
    for slots, survivors in ((1, 1), (4, 2), (6, 3)):
        index.grow(slots)
        for prompt in prompts:
            save(index, prompt, "me")
        assert index.tenant_slots == survivors == sum(kept(index, prompts)) == index.used


def test_without_shares_one_tenant_may_have_it_all() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1)
    save(index, chain("o"), "other")
    save(index, chain("abcd"), "me")
    assert index.tenant_slots == 4 and index.match(chain("abcd"), 4) == 4 and index.match(chain("o"), 1) == 0


def test_growing_in_place_takes_nothing_of_a_share() -> None:
    index = PrefixIndex(slots=2, chunk_blocks=4, tenant_share=0.5)
    prompt = chain(range(4))
    save(index, prompt[:1], "me")
    for stop in (2, 4):
        save(index, prompt[:stop], "me")
    assert index.match(prompt, 4) == 4 and held(index, "me") == 1
    assert index.reserve(chain(range(5)), 4, 5, tenant="me") is None, "its only chunk is the one to be followed"


def test_a_chunk_is_of_the_tenant_whose_reservation_made_it() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=2, tenant_share=0.5)
    prompt = chain(range(6))
    save(index, prompt[:1], "me")
    spans = save(index, prompt[:4], "other")
    assert [(chunk.tenant, lo, hi) for chunk, lo, hi in spans] == [("me", 1, 2), ("other", 0, 2)]
    assert (held(index, "me"), held(index, "other")) == (1, 1)


def test_a_tenant_evicts_no_chunk_that_anothers_hangs_behind_and_is_refused_instead() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.25)
    prompt = chain("ab")
    save(index, prompt[:1], "me")
    save(index, prompt, "other")
    assert index.reserve(chain("x"), 0, 1, tenant="me") is None
    assert index.match(prompt, 2) == 2 and index.evicted == 0
    save(index, chain("y"), "other")
    save(index, chain("x"), "me")
    assert index.match(prompt, 2) == 0


def test_a_refused_tenant_leaves_anothers_chunk_that_its_own_hang_behind_in_its_place() -> None:
    index = PrefixIndex(slots=3, chunk_blocks=1, tenant_share=0.7)
    prompt = chain("ab")
    save(index, prompt[:1], "other")
    save(index, prompt, "me")
    index.pin(save(index, chain("p"), "me"))
    assert index.reserve(chain("xy"), 0, 2, tenant="me") is None
    assert index.match(prompt, 2) == 2
    assert index.reserve(chain("yz"), 0, 2, tenant="third") is not None
    assert index.match(prompt, 2) == index.evicted - 2 == 0


def test_a_thousand_tenants_leave_nothing_behind() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1, tenant_share=0.5)
    for salt in range(1_000):
        save(index, chain([salt]), str(salt))
    assert index._tenants is not None and list(index._tenants._accounts) == ["996", "997", "998", "999"]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]),
            st.sampled_from(["save", "save", "touch", "begin", "end", "abandon", "pin", "unpin"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
        ),
        min_size=10,
        max_size=60,
    )
)
def test_where_all_shares_fit_each_tenant_has_as_it_were_a_pool_of_its_own(
    operations: list[tuple[str | None, str, list[int]]],
) -> None:
    shared = PrefixIndex(slots=12, chunk_blocks=2, tenant_share=0.334)
    own = {tenant: PrefixIndex(slots=4, chunk_blocks=2) for tenant in (None, "a", "b")}
    begun: list[tuple[str | None, list[Span], list[Span]]] = []
    pinned: list[tuple[str | None, list[Span], list[Span]]] = []
    seen: list[tuple[str | None, list[bytes]]] = []
    for tenant, operation, blocks in operations:
        prompt, mine = chain([tenant, *blocks]), own[tenant]
        seen.append((tenant, prompt))
        if operation in ("save", "begin"):
            start = shared.known(prompt, 0, len(prompt))
            assert start == mine.known(prompt, 0, len(prompt))
            got = shared.reserve(prompt, start, len(prompt), tenant=tenant)
            expected = mine.reserve(prompt, start, len(prompt))
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                assert [span[1:] for span in got] == [span[1:] for span in expected]
                begun.append((tenant, got, expected))
                if operation == "save":
                    _, got, expected = begun.pop()
                    assert shared.publish(got) == mine.publish(expected)
        elif operation in ("end", "abandon") and begun:
            owner, got, expected = begun.pop(0)
            for index, spans in ((shared, got), (own[owner], expected)):
                if operation == "abandon":
                    index.abandon(spans)
                    index.retire(spans)
                else:
                    index.publish(spans)
        elif operation == "touch":
            shared.touch(prompt, len(prompt))
            mine.touch(prompt, len(prompt))
        elif operation == "pin":
            stop = shared.match(prompt, len(prompt))
            got, expected = shared.locate(prompt, 0, stop), mine.locate(prompt, 0, stop)
            assert got is not None and expected is not None
            shared.pin(got)
            mine.pin(expected)
            pinned.append((tenant, got, expected))
        elif operation == "unpin" and pinned:
            owner, got, expected = pinned.pop(0)
            shared.unpin(got)
            own[owner].unpin(expected)
        assert [shared.match(prompt, len(prompt)) for _, prompt in seen] == [
            own[owner].match(prompt, len(prompt)) for owner, prompt in seen
        ]
        assert {owner: held(shared, owner) for owner in own} == {owner: index.used for owner, index in own.items()}
    assert shared.evicted == sum(index.evicted for index in own.values())
