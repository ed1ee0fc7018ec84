from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from layerstream.jobs import TierObject
from layerstream.lookups import Lookup, Ticket
from layerstream.tiers.grid import ObjectGrid
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import NAMESPACE, chain

GRID = ObjectGrid(namespace=NAMESPACE, chunk_blocks=4)
PROMPT = chain(range(15))
WHOLE = GRID.whole(PROMPT, 15)
TAILS = {one.blocks: one for one in GRID.tails(PROMPT, 12, parent=WHOLE[-1].key)}


class Absent:
    """Hears what tiers lack."""

    def __init__(self) -> None:
        self.told: list[tuple[int, TierObject]] = []

    def __call__(self, place: int, objects: Sequence[TierObject]) -> None:
        self.told += [(place, one) for one in objects]


def look_up(
    *tiers: FakeTier, prompt: list[bytes] = PROMPT, limit: int | None = None, absent: Absent | None = None
) -> Lookup:
    return Lookup(
        [tier.client for tier in tiers],
        GRID,
        prompt,
        len(prompt) if limit is None else limit,
        absent=Absent() if absent is None else absent,
    )


def keeping(*objects: TierObject, place: int = 0, prompt: list[bytes] = PROMPT, **options: Any) -> FakeTier:
    tier = FakeTier(place, **options)
    for one in objects:
        tier.put(one, prompt)
    return tier


def found(lookup: Lookup) -> list[tuple[int, int, int]]:
    """(start, blocks, tier) of each source."""
    return [(source.object.start, source.object.blocks, source.ticket.tier.place) for source in lookup.sources]


def give_back(lookup: Lookup) -> None:
    for source in lookup.sources:
        source.ticket.give()


def test_each_object_comes_from_the_first_tier_that_has_it() -> None:
    tiers = keeping(WHOLE[0]), keeping(WHOLE[0], WHOLE[1], place=1), keeping(*WHOLE, TAILS[3], place=2)
    lookup = look_up(*tiers)
    assert lookup.advance()
    assert found(lookup) == [(0, 4, 0), (4, 4, 1), (8, 4, 2), (12, 3, 2)]
    assert not lookup.failed


def test_the_first_object_that_no_tier_has_ends_the_hit() -> None:
    for missing in range(3):
        lookup = look_up(keeping(*(one for place, one in enumerate(WHOLE) if place != missing)))
        assert lookup.advance()
        assert found(lookup) == [(4 * place, 4, 0) for place in range(missing)]


@pytest.mark.parametrize("kept", [(1,), (2, 1), (1, 3)])
def test_the_longest_tail_comes_from_wherever_it_is(kept: tuple[int, ...]) -> None:
    tiers = [keeping(*WHOLE, TAILS[blocks], place=place) for place, blocks in enumerate(kept)]
    lookup = look_up(*tiers)
    assert lookup.advance()
    assert found(lookup)[-1] == (12, max(kept), kept.index(max(kept)))


def test_a_tail_may_follow_any_whole_object() -> None:
    short = GRID.object(PROMPT, 4, 2, parent=WHOLE[0].key)
    lookup = look_up(keeping(WHOLE[0], short))
    assert lookup.advance()
    assert found(lookup) == [(0, 4, 0), (4, 2, 0)]


def test_only_tiers_that_keep_tails_are_asked_for_them() -> None:
    plain, other = keeping(*WHOLE, tails=False), keeping(*WHOLE, place=1)
    assert look_up(plain, other).advance()
    assert plain.count("find") == 1 and other.count("find") == 2


@pytest.mark.parametrize("blocks", [4, 8, 12])
def test_a_prompt_of_whole_objects_brings_its_last_one_whole_and_asks_for_no_tail(blocks: int) -> None:
    tier = keeping(*WHOLE)
    lookup = look_up(tier, prompt=PROMPT[:blocks], limit=blocks - 1)
    assert lookup.advance()
    assert found(lookup) == [(start, 4, 0) for start in range(0, blocks, 4)]
    assert tier.count("find") == 1


def test_what_is_beyond_the_limit_is_not_asked_for() -> None:
    tier = keeping(*WHOLE, *TAILS.values())
    assert look_up(tier, prompt=PROMPT[:13], limit=12).advance()
    (_, (asked, tails)) = tier.calls[0]
    assert (list(asked), tails, tier.count("find")) == (WHOLE, (), 1)


@pytest.mark.parametrize(("limit", "objects"), [(9, 3), (8, 2), (5, 2), (4, 1)])
def test_objects_are_asked_for_up_to_the_one_that_holds_the_last_block_of_use(limit: int, objects: int) -> None:
    tier = keeping(*WHOLE)
    lookup = look_up(tier, prompt=PROMPT[:12], limit=limit)
    assert lookup.advance()
    assert tier.calls[0] == ("find", (tuple(WHOLE[:objects]), ()))
    assert found(lookup) == [(4 * place, 4, 0) for place in range(objects)]


def test_a_prompt_shorter_than_a_chunk_asks_for_tails_alone() -> None:
    first = GRID.object(PROMPT, 0, 2, parent=b"")
    tier = keeping(first)
    lookup = look_up(tier, prompt=PROMPT[:3])
    assert lookup.advance() and found(lookup) == [(0, 2, 0)]
    plain = keeping(tails=False)
    lookup = look_up(plain, prompt=PROMPT[:3])
    assert lookup.advance() and found(lookup) == [] and plain.count("find") == 0


def test_it_waits_for_every_tier_in_each_of_its_two_questions() -> None:
    slow, quick = keeping(*WHOLE, TAILS[2], at_once=False), keeping(*WHOLE, place=1)
    lookup = look_up(slow, quick)
    for _ in range(2):
        assert not lookup.advance() and not lookup.advance()
        slow.answer()
    assert lookup.advance()
    assert found(lookup) == [(0, 4, 0), (4, 4, 0), (8, 4, 0), (12, 2, 0)]


def test_a_tier_that_does_not_answer_leaves_the_hit_to_the_others() -> None:
    dead, other = keeping(*WHOLE, at_once=False), keeping(*WHOLE[:2], place=1)
    lookup = look_up(dead, other)
    dead.fall_ill()
    assert lookup.advance()
    assert found(lookup) == [(0, 4, 1), (4, 4, 1)] and lookup.failed
    assert dead.count("find") == 1, "an ill tier is not asked for tails"


def test_tickets_go_back_once_nobody_reads_with_them() -> None:
    used, unused = keeping(*WHOLE[:2]), keeping(*WHOLE, TAILS[1], place=1)
    lookup = look_up(used, unused)
    assert lookup.advance()
    # Of the second question the first tier has nothing to read, and the second one has the tail.
    assert used.tickets == {"tier0-1"} and unused.tickets == {"tier1-1", "tier1-2"}
    for left, source in zip([(1, 2), (0, 2), (0, 1), (0, 0)], lookup.sources, strict=True):
        source.ticket.give()
        assert (len(used.tickets), len(unused.tickets)) == left


def test_no_ticket_is_kept_where_nothing_was_found() -> None:
    tier = keeping(WHOLE[1], WHOLE[2], TAILS[1])
    lookup = look_up(tier)
    assert lookup.advance() and found(lookup) == [] and not tier.tickets


@pytest.mark.parametrize("answered", range(4))
def test_a_lookup_that_nobody_wants_gives_everything_back_at_any_stage(answered: int) -> None:
    tiers = [keeping(*WHOLE, TAILS[1], place=place, at_once=False) for place in range(2)]
    lookup = look_up(*tiers)
    for tier in itertools.islice(itertools.cycle(tiers), answered):
        if tier.asked:
            tier.answer(1)
        lookup.advance()
    lookup.cancel()
    for tier in tiers:
        tier.answer()
        assert not tier.tickets


def test_what_tiers_turned_out_to_lack_is_told() -> None:
    absent = Absent()
    lookup = look_up(keeping(WHOLE[0], WHOLE[2]), keeping(*WHOLE, TAILS[2], place=1), absent=absent)
    assert lookup.advance()
    lacking = {(place, one.key) for place, one in absent.told}
    assert (0, WHOLE[1].key) in lacking and (1, TAILS[3].key) in lacking
    assert not any((1, one.key) in lacking for one in [*WHOLE, TAILS[2]])
    give_back(lookup)


def test_a_tier_that_does_not_answer_is_not_taken_to_lack_anything() -> None:
    absent = Absent()
    dead = keeping(at_once=False)
    lookup = look_up(dead, absent=absent)
    dead.fall_ill()
    assert lookup.advance() and absent.told == []


def test_a_ticket_given_back_too_often_is_an_error() -> None:
    tier = FakeTier()
    ticket = Ticket(tier.client, "")
    ticket.take()
    ticket.give(2)
    with pytest.raises(AssertionError, match="more often than taken"):
        ticket.give()
    with pytest.raises(AssertionError, match="went back"):
        ticket.take()
