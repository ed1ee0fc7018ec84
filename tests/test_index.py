from __future__ import annotations

import hashlib
import pickle
from collections.abc import Hashable, Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layerstream.index import Chunk, PrefixIndex, Span
from layerstream.policies import LRU
from tests.rigs.index_listener import Believer


def chain(blocks: Iterable[object]) -> list[bytes]:
    """Block hashes of a prompt, each over its block and the hash before it."""
    hashes = [b"start"]
    for block in blocks:
        hashes.append(hashlib.sha256(hashes[-1] + repr(block).encode()).digest())
    return hashes[1:]


def reserve(index: PrefixIndex, hashes: Sequence[bytes], stop: int | None = None) -> list[Span]:
    """Index what the index lacks of a prompt, as being written."""
    stop = len(hashes) if stop is None else stop
    spans = index.reserve(hashes, index.known(hashes, 0, stop), stop)
    assert spans is not None
    return spans


def save(index: PrefixIndex, hashes: Sequence[bytes], stop: int | None = None) -> list[Span]:
    spans = reserve(index, hashes, stop)
    index.publish(spans)
    return spans


def pages(index: PrefixIndex, spans: Iterable[Span]) -> list[int]:
    return [page for first, count in index.runs(spans) for page in range(first, first + count)]


def test_a_hit_may_end_at_any_block() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=4)
    prompt = chain(range(11))
    save(index, prompt)
    assert [index.match(prompt, stop) for stop in range(13)] == [*range(12), 11]


def test_prompts_that_part_three_blocks_into_a_chunk_hit_to_the_block() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=4)
    one, two = chain([0, 1, 2, 3, 4]), chain([0, 1, 2, "x", "y"])
    save(index, one)
    assert index.match(two, 5) == 3
    spans = save(index, two)
    assert sum(hi - lo for _, lo, hi in spans) == 2
    assert index.match(one, 5) == index.match(two, 5) == 5
    shared = index.locate(one, 0, 3)
    assert shared is not None and shared == index.locate(two, 0, 3)
    for prompt in (one, two):
        found = index.locate(prompt, 0, 5)
        assert found is not None and len(set(pages(index, found))) == 5


def test_a_chunk_grows_in_place_until_it_is_full() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=4)
    prompt = chain(range(6))
    assert [index.runs(save(index, prompt, stop)) for stop in (1, 3, 6)] == [
        ((0, 1),),
        ((1, 2),),
        ((3, 3),),
    ]
    assert index.used == index.chunks == 2


def test_a_grown_pool_takes_more_before_anything_is_evicted() -> None:
    index = PrefixIndex(slots=2, chunk_blocks=2)
    first, second = chain(range(4)), chain("abcd")
    pinned = save(index, first)
    index.pin(pinned)
    assert index.reserve(second, 0, 4) is None
    index.grow(4)
    assert (index.slots, index.used) == (4, 2)
    assert pages(index, save(index, second)) == [4, 5, 6, 7]
    assert index.match(first, 4) == index.match(second, 4) == 4
    assert index.evicted == 0
    index.unpin(pinned)
    assert index.used == 4


def test_a_chat_of_ten_turns_stores_no_block_twice() -> None:
    index = PrefixIndex(slots=100, chunk_blocks=4)
    told: list[object] = []
    stored: list[bytes] = []
    for turn in range(10):
        told += [(turn, block) for block in range(turn % 5 + 2)]
        prompt = chain(told)
        before = index.match(prompt, len(prompt))
        assert before == len(stored)
        stored += prompt[before:]
        assert sum(hi - lo for _, lo, hi in save(index, prompt)) == len(prompt) - before
    assert len(stored) == len(told) == len(set(stored))
    assert index.chunks == -(-len(told) // 4)


@pytest.mark.parametrize(
    "chunks", [1, 2, *range(31, 34), *range(63, 66), 114, *range(127, 130), *range(255, 258), 1025]
)
def test_every_block_of_a_prefix_of_many_chunks_has_a_page_of_its_own(chunks: int) -> None:
    index = PrefixIndex(slots=chunks, chunk_blocks=2)
    prompt = chain(range(2 * chunks))
    written = pages(index, save(index, prompt))
    assert index.match(prompt, len(prompt)) == len(prompt)
    found = index.locate(prompt, 0, len(prompt))
    assert found is not None and pages(index, found) == written
    assert sorted(written) == list(range(2 * chunks))
    for at in range(len(prompt)):
        block = index.locate(prompt, at, at + 1)
        assert block is not None and pages(index, block) == [written[at]]


def test_only_published_blocks_are_located() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=4)
    prompt = chain(range(6))
    save(index, prompt, 3)
    reserve(index, prompt)
    assert index.known(prompt, 0, 6) == 6 and index.match(prompt, 6) == 3
    assert index.locate(prompt, 0, 3) is not None
    assert index.locate(prompt, 0, 4) is None
    assert index.locate(prompt, 2, 6) is None


def test_blocks_are_published_only_behind_published_blocks() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=2)
    prompt = chain(range(6))
    first, second, third = (reserve(index, prompt, stop) for stop in (1, 3, 6))
    index.publish(third)
    assert index.match(prompt, 6) == 0
    index.publish(first)
    assert index.match(prompt, 6) == 1
    index.publish(second)
    assert index.match(prompt, 6) == 6


def test_an_abandoned_save_takes_all_that_hangs_behind_it_and_keeps_its_slots_until_its_writers_stop() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=2)
    prompt, other = chain(range(6)), chain([0, "x", "y"])
    save(index, prompt, 1)
    lost = reserve(index, prompt, 3)
    save(index, prompt)
    save(index, other)
    assert index.used == index.chunks == 4
    index.abandon(lost)
    assert index.known(prompt, 0, 6) == index.match(prompt, 6) == 1
    assert index.match(other, 3) == 3
    assert index.chunks == 2
    assert index.used == 3, "of the two chunks behind the lost block, one is free and one may still be written to"
    again = reserve(index, prompt)
    assert not set(pages(index, again)) & set(pages(index, lost)), "a late write would land in another block"
    index.retire(lost)
    index.publish(again)
    assert index.match(prompt, 6) == 6 and index.used == index.chunks


def test_only_idle_leaves_are_evicted_and_a_tail_goes_before_its_head() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1)
    prompt = chain(range(4))
    save(index, prompt)
    save(index, chain("a"))
    assert index.match(prompt, 4) == 3 and index.evicted == 1
    save(index, chain("b"))
    assert index.match(prompt, 4) == 2


def test_the_head_of_a_used_prompt_outlives_an_older_prompt() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1)
    used, idle = chain(["u", 1]), chain(["i", 1])
    save(index, used)
    save(index, idle)
    index.touch(used, 2)
    save(index, chain("abc"))
    assert index.match(idle, 2) == 0
    assert index.match(used, 2) == 1


class Told(LRU[Chunk]):
    """LRU that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[object, ...]] = []

    def resize(self, slots: int) -> None:
        self.told.append(("resize", slots))

    def see(self, hashes: Sequence[Hashable]) -> None:
        self.told.append(("see", len(hashes)))

    def enter(self, item: Chunk, continues: Chunk | None) -> None:
        self.told.append(("enter", item.slot, None if continues is None else continues.slot))

    def fill(self, item: Chunk) -> None:
        self.told.append(("fill", item.slot))
        super().touch(item)

    def touch(self, item: Chunk) -> None:
        self.told.append(("touch", item.slot))
        super().touch(item)


def test_a_policy_is_told_of_the_pool_of_every_prompt_and_of_what_a_chunk_continues() -> None:
    policy = Told()
    index = PrefixIndex(slots=8, chunk_blocks=2, policy=policy)
    index.grow(9)
    prompt, other = chain(range(6)), chain([0, 1, "x"])
    save(index, prompt, 3)
    save(index, prompt, 6)
    save(index, other)
    index.touch(prompt, 5)
    index.touch(chain("unknown"), 0)
    assert policy.told == [
        ("resize", 8), ("resize", 9),
        ("enter", 0, None), ("enter", 1, 0), ("fill", 1),
        ("enter", 2, 1), ("fill", 2),
        ("enter", 3, None), ("fill", 3),
        ("see", 6), ("touch", 2),
        ("see", 7),
    ]  # fmt: skip


def test_no_room_changes_nothing() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1)
    pinned, idle = chain(range(2)), chain("ab")
    save(index, pinned)
    save(index, idle)
    spans = index.locate(pinned, 0, 2)
    assert spans is not None
    index.pin(spans)
    assert index.reserve(chain("xyz"), 0, 3) is None
    assert index.match(idle, 2) == 2 and index.evicted == 0 and index.chunks == 4
    index.unpin(spans)
    assert index.reserve(chain("xyz"), 0, 3) is not None


@pytest.mark.parametrize("busy", ["pinned", "written"])
def test_a_head_in_use_stays_when_its_tail_goes(busy: str) -> None:
    index = PrefixIndex(slots=2, chunk_blocks=2)
    head, tail = chain([0, 1]), chain([0, "x"])
    save(index, head, 1)
    save(index, tail[:1])
    growing = reserve(index, head)
    save(index, tail)
    if busy == "pinned":
        index.publish(growing)
        index.pin(growing)
    assert index.reserve(chain("abc"), 0, 3) is None
    assert index.match(tail, 2) == 2
    save(index, chain("ab"))
    assert index.match(tail, 2) == 1 and index.evicted == 1


def test_making_room_never_evicts_the_chunk_that_is_to_be_followed() -> None:
    index = PrefixIndex(slots=2, chunk_blocks=1)
    prompt = chain(range(3))
    save(index, prompt, 1)
    save(index, chain("x"))
    save(index, prompt, 2)
    assert index.match(prompt, 3) == 2
    assert index.reserve(prompt, 2, 3) is None
    assert index.match(prompt, 3) == 2


def test_what_follows_an_unknown_block_is_refused() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=2)
    prompt = chain(range(4))
    assert index.reserve(prompt, 2, 4) is None
    assert index.used == 0


def test_pins_never_go_below_zero() -> None:
    index = PrefixIndex(slots=1, chunk_blocks=1)
    prompt = chain("a")
    save(index, prompt)
    spans = index.locate(prompt, 0, 1)
    assert spans is not None
    index.pin(spans)
    index.unpin(spans)
    with pytest.raises(AssertionError, match="unpinned more often"):
        index.unpin(spans)


def test_clearing_keeps_slots_in_use_and_publishes_nothing_later() -> None:
    index = PrefixIndex(slots=4, chunk_blocks=1)
    read, written = chain("r"), chain("w")
    save(index, read)
    spans = index.locate(read, 0, 1)
    assert spans is not None
    index.pin(spans)
    writing = reserve(index, written)
    save(index, chain("xy"))
    index.clear()
    assert index.chunks == 0 and index.used == 2
    assert index.publish(writing) == 0
    assert index.match(written, 1) == 0 and index.used == 1
    index.unpin(spans)
    assert index.used == 0
    save(index, read)
    assert index.match(read, 1) == 1


def test_who_listens_hears_of_what_is_cut_off_a_chunk_and_of_all_behind_it() -> None:
    index, believer = PrefixIndex(slots=8, chunk_blocks=4), Believer()
    index.listener = believer
    hashes = chain(range(11))
    save(index, hashes, 2)
    grown = reserve(index, hashes, 11)
    believer.check(index)
    assert len(believer.indexed) == 11 and believer.hits == set(hashes[:2])
    index.abandon(grown)
    believer.check(index)
    assert believer.indexed == believer.hits == set(hashes[:2])
    index.retire(grown)
    index.clear()
    assert not believer.indexed


def test_a_chunk_counts_as_pinned_once_however_many_read_it() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=4)
    spans = save(index, chain(range(8)))
    index.pin(spans)
    index.pin(spans[:1])
    assert index.pinned == 2
    index.unpin(spans[:1])
    assert index.pinned == 2
    index.unpin(spans)
    assert index.pinned == 0


def test_a_block_from_a_tier_counts_for_it_at_its_first_load_and_for_the_pool_after() -> None:
    index = PrefixIndex(slots=8, chunk_blocks=4)
    hashes = chain(range(10))
    save(index, hashes, 2)
    brought = index.reserve(hashes, 2, 8)
    assert brought is not None
    index.publish(brought, source="disk")
    save(index, hashes)
    first = index.locate(hashes, 0, 5)
    assert first is not None
    assert index.take_sources(first) == {"host": 2, "disk": 3}
    whole = index.locate(hashes, 0, 10)
    assert whole is not None
    assert index.take_sources(whole) == {"host": 7, "disk": 3}
    assert index.take_sources(whole) == {"host": 10}


def test_what_a_tier_brought_is_forgotten_with_its_chunk() -> None:
    index = PrefixIndex(slots=1, chunk_blocks=4)
    hashes, other = chain(range(4)), chain("abcd")
    spans = index.reserve(hashes, 0, 4)
    assert spans is not None
    index.publish(spans, source="disk")
    save(index, other)
    save(index, hashes)
    spans = index.locate(hashes, 0, 4)
    assert spans is not None and index.take_sources(spans) == {"host": 4}


class Machine(RuleBasedStateMachine):
    """Random prompts over a small alphabet, so that they share, part, and come back."""

    SLOTS, CHUNK = 6, 3

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(slots=self.SLOTS, chunk_blocks=self.CHUNK)
        self.prompts: list[list[bytes]] = []
        self.writing: list[list[Span]] = []
        self.abandoned: list[list[Span]] = []
        self.pinned: list[list[Span]] = []
        self.landed: set[bytes] = set()
        """Hashes whose bytes were saved, and that were neither evicted, cut off nor forgotten since."""
        self.alive: dict[int, set[bytes]] = {}
        """id of a list of spans being written -> hashes in it that were not cut off or forgotten since."""

    def live(self) -> list[Chunk]:
        return list(self.index._heads.values())

    def snapshot(self) -> object:
        return [
            (chunk, chunk.slot, *chunk.hashes, chunk.ready, chunk.pins, chunk.writers, chunk.used, *chunk.children)
            for chunk in self.live()
        ]

    def indexed(self) -> set[bytes]:
        return {block for chunk in self.live() for block in chunk.hashes}

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=10), stop=st.integers(1, 10))
    def reserve(self, blocks: list[int], stop: int) -> None:
        prompt = chain(blocks)
        self.prompts.append(prompt)
        stop = min(stop, len(prompt))
        start = self.index.known(prompt, 0, stop)
        assert start == next((at for at in range(stop) if prompt[at] not in self.indexed()), stop)
        if start == stop:
            return
        busy = {chunk for spans in (*self.writing, *self.abandoned, *self.pinned) for chunk, _, _ in spans}
        before = {chunk: list(chunk.hashes) for chunk in self.live()}
        state = self.snapshot()
        evicted = self.index.evicted
        spans = self.index.reserve(prompt, start, stop)
        gone = set(before) - set(self.live())
        assert self.index.evicted - evicted == len(gone)
        assert not gone & busy, "a chunk in use was evicted"
        if spans is None:
            assert self.snapshot() == state
            free = self.SLOTS - len({chunk.slot for chunk in {*before, *busy}})
            assert free + len(self.evictable(before, keep=prompt[:start])) < -(-(stop - start) // self.CHUNK)
            return
        for chunk in gone:
            self.landed -= set(before[chunk])
        assert [block for chunk, lo, hi in spans for block in chunk.hashes[lo:hi]] == prompt[start:stop]
        self.alive[id(spans)] = set(prompt[start:stop])
        self.writing.append(spans)

    def evictable(self, chunks: Iterable[Chunk], keep: list[bytes]) -> set[Chunk]:
        """Chunks that could go one after the other, leaves first, without touching the prompt to be followed."""
        left = set(chunks)
        while True:
            leaves = {
                chunk
                for chunk in left
                if not (chunk.pins or chunk.writers or set(chunk.hashes) & set(keep))
                and not any(child in left for child in chunk.children)
            }
            if not leaves:
                return set(chunks) - left
            left -= leaves

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        spans = self.writing.pop(which % len(self.writing))
        alive = self.alive.pop(id(spans))
        assert self.index.publish(spans) == len(alive)
        self.landed |= alive

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99))
    def abandon(self, which: int) -> None:
        spans = self.writing.pop(which % len(self.writing))
        lost = self.alive.pop(id(spans))
        behind = {
            block
            for prompt in self.prompts
            for at, _ in enumerate(prompt)
            if prompt[at] in lost
            for block in prompt[at:]
        }
        indexed = self.indexed()
        self.index.abandon(spans)
        assert not self.indexed() & behind
        assert indexed - self.indexed() == indexed & behind, "a block before the lost ones went too"
        self.landed -= behind
        for alive in self.alive.values():
            alive -= behind
        self.abandoned.append(spans)

    @precondition(lambda self: self.abandoned)
    @rule(which=st.integers(0, 99))
    def retire(self, which: int) -> None:
        self.index.retire(self.abandoned.pop(which % len(self.abandoned)))

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99), start=st.integers(0, 9))
    def pin(self, which: int, start: int) -> None:
        prompt = self.prompts[which % len(self.prompts)]
        stop = self.index.match(prompt, len(prompt))
        spans = self.index.locate(prompt, min(start, stop), stop)
        assert spans is not None
        self.index.pin(spans)
        self.index.touch(prompt, stop)
        self.pinned.append(spans)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        self.index.unpin(self.pinned.pop(which % len(self.pinned)))

    @rule()
    @precondition(lambda self: len(self.prompts) > 8)
    def clear(self) -> None:
        self.index.clear()
        self.landed.clear()
        for alive in self.alive.values():
            alive.clear()
        assert self.index.chunks == 0

    @invariant()
    def matches_are_right_and_change_nothing(self) -> None:
        state = pickle.dumps(self.index)
        for prompt in self.prompts:
            expected = next((at for at, block in enumerate(prompt) if block not in self.landed), len(prompt))
            assert self.index.match(prompt, len(prompt)) == expected
            spans = self.index.locate(prompt, 0, expected)
            assert spans is not None
            assert [block for chunk, lo, hi in spans for block in chunk.hashes[lo:hi]] == prompt[:expected]
        assert pickle.dumps(self.index) == state

    @invariant()
    def the_forest_is_sound(self) -> None:
        live = self.live()
        blocks = [block for chunk in live for block in chunk.hashes]
        assert len(blocks) == len(set(blocks)), "a block is in two places"
        for head, chunk in self.index._heads.items():
            assert chunk.live and chunk.hashes[0] == head and 0 <= chunk.ready <= len(chunk.hashes) <= self.CHUNK
            assert [child.place for child in chunk.children] == list(range(len(chunk.children)))
            assert all(child.parent is chunk and child.at <= len(chunk.hashes) for child in chunk.children)
            if chunk.parent is not None:
                assert chunk.parent.live and chunk in chunk.parent.children
                assert not chunk.ready or chunk.parent.ready >= chunk.at

    @invariant()
    def slots_are_used_once_and_never_leak(self) -> None:
        users = [*self.writing, *self.abandoned, *self.pinned]
        chunks = {*self.live(), *(chunk for spans in users for chunk, _, _ in spans)}
        assert len({chunk.slot for chunk in chunks}) == len(chunks) == self.index.used
        for chunk in chunks:
            assert chunk.pins == sum(span.chunk is chunk for spans in self.pinned for span in spans)
            assert chunk.writers == sum(
                span.chunk is chunk for spans in (*self.writing, *self.abandoned) for span in spans
            )

    @invariant()
    def exactly_the_idle_leaves_are_evictable(self) -> None:
        idle = {chunk for chunk in self.live() if not (chunk.pins or chunk.writers or chunk.children)}
        assert set(self.index._policy._current) == idle  # type: ignore[attr-defined]

    def teardown(self) -> None:
        for spans in self.writing:
            self.index.publish(spans)
        for spans in self.abandoned:
            self.index.retire(spans)
        for spans in self.pinned:
            self.index.unpin(spans)
        fill = chain(f"fill {block}" for block in range(self.SLOTS * self.CHUNK))
        save(self.index, fill)
        assert self.index.match(fill, len(fill)) == len(fill)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
