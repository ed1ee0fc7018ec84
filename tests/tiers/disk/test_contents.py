from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layerstream.tiers.disk.contents import DiskContents

SHARDS = ("00", "7f", "ff")
KEYS = [f"{shard}{number:062x}" for shard in SHARDS for number in range(3)]
keys, ranks, times = st.sampled_from(KEYS), st.integers(0, 2), st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """Against plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.contents = DiskContents()
        self.sizes: dict[tuple[str, int], int] = {}
        self.used: dict[str, int] = {}
        self.popped: set[str] = set()

    def forget(self, gone: set[tuple[str, int]]) -> None:
        for each in gone:
            self.sizes.pop(each, None)
        for key in set(self.used) - {key for key, _ in self.sizes}:
            del self.used[key]
            self.popped.discard(key)

    @rule(key=keys, rank=ranks, size=st.integers(1, 5), when=times)
    def put(self, key: str, rank: int, size: int, when: int) -> None:
        self.contents.put(key, rank, size, when)
        self.sizes[key, rank] = size
        self.used[key] = max(when, self.used.get(key, when))

    @rule(key=keys, rank=ranks)
    def drop(self, key: str, rank: int) -> None:
        self.contents.drop(key, rank)
        self.forget({(key, rank)})

    @rule(key=keys, when=times)
    def set_used(self, key: str, when: int) -> None:
        self.contents.set_used(key, when)
        if key in self.used:
            self.used[key] = when

    @rule(shard=st.sampled_from(SHARDS), seen=st.sets(st.tuples(keys, ranks)))
    def keep_only(self, shard: str, seen: set[tuple[str, int]]) -> None:
        known = {each for each in self.sizes if each[0].startswith(shard)}
        self.contents.keep_only(shard, known & seen)
        self.forget(known - seen)

    @rule(stays=st.booleans())
    def pop(self, stays: bool) -> None:
        key = self.contents.pop_oldest()
        waiting = {key: when for key, when in self.used.items() if key not in self.popped}
        if key is None:
            assert not waiting
            return
        assert key in self.used and (key not in waiting or waiting[key] == min(waiting.values()))
        if stays:
            self.contents.put_back(key)
            self.popped.discard(key)
        else:
            self.popped.add(key)

    @invariant()
    def counts_are_right(self) -> None:
        assert self.contents.used_bytes == sum(self.sizes.values())
        assert self.contents.objects == len(self.used)
        for key in KEYS:
            entry = self.contents.get(key)
            assert (entry is not None) == (key in self.used)
            if entry is not None:
                assert entry.used_ns == self.used[key]
                assert entry.sizes == {rank: size for (name, rank), size in self.sizes.items() if name == key}
                assert entry.nbytes == sum(entry.sizes.values())


TestContents = Machine.TestCase


def test_what_was_used_since_it_queued_goes_later() -> None:
    contents = DiskContents()
    for when, key in enumerate(KEYS):
        contents.put(key, 0, 1, when)
    contents.set_used(KEYS[0], 100)
    contents.set_used(KEYS[5], -1)
    order = [contents.pop_oldest() for _ in KEYS]
    assert order == [KEYS[5], *KEYS[1:5], *KEYS[6:], KEYS[0]]
    assert contents.pop_oldest() is None


def test_what_others_remove_does_not_pile_up() -> None:
    contents = DiskContents()
    for round_number in range(20_000):
        contents.put(KEYS[0], 0, 1, round_number)
        contents.drop(KEYS[0], 0)
    contents.put(KEYS[1], 0, 1, 5)
    assert len(contents._queue) < 3000
    assert (contents.pop_oldest(), contents.pop_oldest()) == (KEYS[1], None)
