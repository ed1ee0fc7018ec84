"""The index, with shares and without, against a model that searches a list for everything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from layerstream.index import Chunk, PrefixIndex, Span
from layerstream.insertion import AdaptiveInsertion
from layerstream.policies import LRU, EvictionPolicy


def chain(blocks: Iterable[object]) -> list[bytes]:
    """Block hashes of a prompt, each over its block and the hash before it."""
    hashes = [b"start"]
    for block in blocks:
        hashes.append(hashlib.sha256(hashes[-1] + repr(block).encode()).digest())
    return hashes[1:]


@dataclass(eq=False)
class Row:
    """What is to be known of a chunk."""

    hashes: list[bytes]
    parent: Row | None
    at: int
    tenant: str | None
    users: int = 0
    used: int = 0
    closed: bool = False
    live: bool = True


class Model:
    """The index as a list that is searched from end to end for everything."""

    def __init__(self, slots: int, chunk_blocks: int, share: float | None) -> None:
        self.slots, self.chunk_blocks, self.share = slots, chunk_blocks, share
        self.rows: list[Row] = []
        """Those that occupy a slot."""
        self.tick = 0

    @property
    def limit(self) -> int:
        return self.slots if self.share is None else max(1, int(self.share * self.slots))

    def held(self, tenant: str | None) -> int:
        return sum(row.tenant == tenant for row in self.rows)

    def live(self) -> list[Row]:
        return [row for row in self.rows if row.live]

    def owner(self, block: bytes) -> Row:
        (row,) = (row for row in self.rows if block in row.hashes)
        return row

    def idle(self, among: Sequence[Row]) -> list[Row]:
        return [row for row in among if not row.users and not any(child.parent is row for child in among)]

    def stamp(self, row: Row) -> None:
        self.tick += 1
        row.used = self.tick

    def reserve(
        self, hashes: Sequence[bytes], start: int, stop: int, tenant: str | None, equals: set[Row]
    ) -> tuple[list[Row], list[Row] | None]:
        """What goes, and which rows the blocks are in; of rows with equal stamps those in `equals` go first."""
        parent = self.owner(hashes[start - 1]) if start else None
        at = parent.hashes.index(hashes[start - 1]) + 1 if parent else 0
        grown = 0
        if parent is not None and at == len(parent.hashes) and not parent.closed:
            grown = min(self.chunk_blocks - at, stop - start)
        rest = list(hashes[start + grown : stop])
        pieces = [rest[at : at + self.chunk_blocks] for at in range(0, len(rest), self.chunk_blocks)]
        left, victims = self.live(), list[Row]()
        while True:
            gone = sum(row.tenant == tenant for row in victims)
            over = self.share is not None and self.held(tenant) - gone + len(pieces) > self.limit
            if not over and len(self.rows) - len(victims) + len(pieces) <= self.slots:
                break
            idle = [row for row in self.idle(left) if row is not parent and (row.tenant == tenant or not over)]
            if not idle:
                return [], None
            victim = min(idle, key=lambda row: (row.used, row not in equals))
            victims.append(victim)
            left.remove(victim)
        for row in victims:
            row.live = False
            self.rows.remove(row)
        into: list[Row] = []
        if parent is not None and grown:
            parent.hashes += hashes[start : start + grown]
            into.append(parent)
            at += grown
        for piece in pieces:
            parent = Row(piece, parent, at, tenant)
            at = len(piece)
            self.rows.append(parent)
            into.append(parent)
        for row in into:
            row.users += 1
        self.stamp(into[-1])
        return victims, into

    def leave(self, row: Row) -> None:
        row.users -= 1
        self._forget_dead()

    def cut(self, row: Row, length: int) -> None:
        if not row.live:
            return
        for child in [child for child in self.rows if child.parent is row and child.at > length]:
            self.cut(child, 0)
        del row.hashes[length:]
        row.closed, row.live = True, length > 0
        self._forget_dead()

    def clear(self) -> None:
        for row in self.rows:
            row.live, row.parent = False, None
            row.hashes.clear()
        self._forget_dead()

    def _forget_dead(self) -> None:
        self.rows = [row for row in self.rows if row.live or row.users]


class Machine(RuleBasedStateMachine):
    """Tenants with few prompts that share, part and come back, against the model.

    Each prompt is saved by its own tenant alone, unless MIXED: keys promise that, and shares must not rely on it.
    """

    SHARE: float | None = 0.5
    MIXED = False
    POLICY: Callable[[], EvictionPolicy[Chunk]] = LRU
    CHUNK, SLOTS, MOST = 2, 6, 12
    TENANTS = (None, "a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(
            slots=self.SLOTS, chunk_blocks=self.CHUNK, policy=type(self).POLICY(), tenant_share=self.SHARE
        )
        self.model = Model(self.SLOTS, self.CHUNK, self.SHARE)
        self.rows: dict[Chunk, Row] = {}
        self.prompts: list[list[bytes]] = []
        self.writing: list[list[Span]] = []
        self.abandoned: list[list[Span]] = []
        self.pinned: list[list[Span]] = []

    def rows_of(self, spans: Iterable[Span]) -> Iterator[Row]:
        return (self.rows[chunk] for chunk, _, _ in spans)

    @rule(
        tenant=st.sampled_from(TENANTS),
        owner=st.sampled_from(TENANTS),
        blocks=st.lists(st.integers(0, 1), max_size=5),
        at_once=st.booleans(),
    )
    def reserve(self, tenant: str | None, owner: str | None, blocks: list[int], at_once: bool) -> None:
        prompt = chain([owner if self.MIXED else tenant, *blocks])
        self.prompts.append(prompt)
        start = self.index.known(prompt, 0, len(prompt))
        if start == len(prompt):
            return
        before = set(self.index._heads.values())
        state = [(chunk, *chunk.hashes, *chunk.children, chunk.used) for chunk in self.index._heads.values()]
        evicted = self.index.evicted
        spans = self.index.reserve(prompt, start, len(prompt), tenant=tenant)
        gone = {self.rows[chunk] for chunk in before - set(self.index._heads.values())}
        victims, into = self.model.reserve(prompt, start, len(prompt), tenant, gone)
        assert gone == set(victims)
        assert self.index.evicted - evicted == len(victims)
        assert (spans is None) == (into is None)
        if spans is None or into is None:
            after = [(chunk, *chunk.hashes, *chunk.children, chunk.used) for chunk in self.index._heads.values()]
            assert after == state
            return
        assert len(spans) == len(into)
        for (chunk, _, _), row in zip(spans, into, strict=True):
            assert self.rows.setdefault(chunk, row) is row
        self.writing.append(spans)
        if at_once:
            self.publish(-1)

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        spans = self.writing.pop(which % len(self.writing))
        self.index.publish(spans)
        for row in self.rows_of(spans):
            self.model.leave(row)

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99))
    def abandon(self, which: int) -> None:
        spans = self.writing.pop(which % len(self.writing))
        self.index.abandon(spans)
        for row, (_, lo, _) in zip(self.rows_of(spans), spans, strict=True):
            self.model.cut(row, lo)
        self.abandoned.append(spans)

    @precondition(lambda self: self.abandoned)
    @rule(which=st.integers(0, 99))
    def retire(self, which: int) -> None:
        spans = self.abandoned.pop(which % len(self.abandoned))
        self.index.retire(spans)
        for row in self.rows_of(spans):
            self.model.leave(row)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99), pin=st.booleans())
    def use(self, which: int, pin: bool) -> None:
        prompt = self.prompts[which % len(self.prompts)]
        stop = self.index.match(prompt, len(prompt))
        self.index.touch(prompt, stop)
        if stop:
            self.model.stamp(self.model.owner(prompt[stop - 1]))
        if pin:
            spans = self.index.locate(prompt, 0, stop)
            assert spans is not None
            self.index.pin(spans)
            for row in self.rows_of(spans):
                row.users += 1
            self.pinned.append(spans)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        spans = self.pinned.pop(which % len(self.pinned))
        self.index.unpin(spans)
        for row in self.rows_of(spans):
            self.model.leave(row)

    @precondition(lambda self: self.index.slots < self.MOST)
    @rule(slots=st.integers(1, 3))
    def grow(self, slots: int) -> None:
        self.model.slots = min(self.index.slots + slots, self.MOST)
        self.index.grow(self.model.slots)

    @precondition(lambda self: len(self.prompts) > 10)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.clear()
        self.prompts.clear()

    @invariant()
    def no_tenant_has_more_than_its_share(self) -> None:
        in_use = {chunk for spans in (*self.writing, *self.abandoned, *self.pinned) for chunk, _, _ in spans}
        holders = {*self.index._heads.values(), *in_use}
        assert self.index.used == len(holders) == len(self.model.rows) <= self.index.slots
        for tenant in self.TENANTS:
            count = sum(chunk.tenant == tenant for chunk in holders)
            assert count == self.model.held(tenant) <= self.index.tenant_slots == self.model.limit
            assert self.index._tenants is None or self.index._tenants.held(tenant) == count

    @invariant()
    def chunks_are_those_of_the_model(self) -> None:
        chunks = {tuple(chunk.hashes): chunk.tenant for chunk in self.index._heads.values()}
        assert chunks == {tuple(row.hashes): row.tenant for row in self.model.live()}

    @invariant()
    def exactly_the_idle_leaves_are_evictable(self) -> None:
        idle = set(self.model.idle(self.model.live()))
        tenants = self.index._tenants
        if tenants is None:
            assert {self.rows[chunk] for chunk in self.index._policy._current} == idle  # type: ignore[attr-defined]
            return
        assert {self.rows[chunk] for chunk in tenants._policy._current} == idle  # type: ignore[attr-defined]
        assert set(tenants._accounts) == {row.tenant for row in self.model.rows}
        for tenant, account in tenants._accounts.items():
            assert {self.rows[chunk] for chunk in account.idle._current} == {
                row for row in idle if row.tenant == tenant
            }

    def teardown(self) -> None:
        for spans in self.writing:
            self.index.publish(spans)
        for spans in self.abandoned:
            self.index.retire(spans)
        for spans in self.pinned:
            self.index.unpin(spans)
        if self.MIXED:
            self.index.clear()
        for tenant in self.TENANTS:
            fill = chain(("fill", tenant, block) for block in range(self.index.tenant_slots * self.CHUNK))
            whole = self.index.reserve(fill, 0, len(fill), tenant=tenant)
            assert whole is not None, "a tenant cannot get to its share"
            self.index.publish(whole)
            assert self.index.match(fill, len(fill)) == len(fill)


class Adaptive(Machine):
    """Which stamps the policy gives is its own business: the model takes them over once it has said what goes."""

    POLICY = AdaptiveInsertion

    @invariant()
    def stamps_are_those_of_the_policy(self) -> None:
        for chunk, row in self.rows.items():
            row.used = chunk.used


class UnlimitedAdaptive(Adaptive):
    SHARE = None


class Unlimited(Machine):
    SHARE = None


class Whole(Machine):
    SHARE = 1.0


class Mixed(Machine):
    MIXED = True


@pytest.mark.parametrize("machine", [Machine, Unlimited, Whole, Mixed, Adaptive, UnlimitedAdaptive])
def test_an_index_with_shares_does_as_a_plain_model_does(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=50))
