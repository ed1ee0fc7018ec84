from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.errors import ConfigError, TierError
from layerstream.jobs import JobKind, Report
from layerstream.metrics import TierTraffic
from layerstream.tiers.base import Batch, Item, StoreSite, TierStore
from layerstream.tiers.mover import TierMover
from tests.rigs.mover_rig import CHUNK, PAGE_BYTES, MoverRig, same
from tests.rigs.tier_faults import Answers, Fails, FaultyTier, Hangs, Lies, wait_until, works
from tests.rigs.tier_items import make_chain


@pytest.fixture
def open_rig() -> Iterator[Callable[..., MoverRig]]:
    rigs: list[MoverRig] = []

    def open_rig(*tiers: FaultyTier, **options: Any) -> MoverRig:
        rigs.append(MoverRig(*tiers, **options))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        for tier in rig.tiers:
            if isinstance(tier.store, Hangs):
                tier.store.let_go()
            tier.store = works
        assert rig.mover.close(30)
        rig.pool.close()


@pytest.fixture
def rig(open_rig: Callable[..., MoverRig]) -> MoverRig:
    return open_rig()


def chunks(first: int, count: int) -> list[tuple[int, int]]:
    """Pages of consecutive slots."""
    return [(first * CHUNK, count * CHUNK)]


def test_what_is_demoted_comes_back_to_the_byte(rig: MoverRig) -> None:
    chain = make_chain(4)
    rig.put(chain, chunks(0, 4))
    assert rig.end(rig.demote(chain, chunks(0, 4))) == 4
    assert rig.keeps(chain) == [True] * 4
    assert rig.end(rig.promote(chain, chunks(5, 4))) == 4
    assert rig.holds(chain, chunks(5, 4))
    nbytes = sum(rig.form.nbytes(each.blocks) for each in chain)
    traffic = rig.traffic[0]
    assert (traffic.written_objects, traffic.written_bytes) == (traffic.read_objects, traffic.read_bytes) == (4, nbytes)
    assert not any((traffic.missing_objects, traffic.damaged_objects, traffic.refused_objects, traffic.failures))


def test_pages_may_lie_anywhere_in_the_pool(rig: MoverRig) -> None:
    chain = make_chain(3, tail=2)
    runs = [(40, 3), (9, 7), (1, 1), (30, 3)]
    rig.put(chain, runs)
    assert rig.end(rig.demote(chain, runs)) == 4
    elsewhere = [(47, 1), (20, 8), (3, 2), (0, 1), (15, 2)]
    before = rig.snapshot(without=elsewhere)
    assert rig.end(rig.promote(chain, elsewhere)) == 4
    assert rig.holds(chain, elsewhere)
    assert same(before, rig.snapshot(without=elsewhere))


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_blocks_that_the_pool_has_already_are_read_and_left_out(rig: MoverRig, skip: int) -> None:
    chain = make_chain(3)
    rig.keep(chain)
    runs = [(11, 3 * CHUNK - skip)]
    before = rig.snapshot(without=runs)
    assert rig.end(rig.promote(chain, runs, skip=skip)) == 3
    assert rig.holds(chain, runs, skip=skip)
    assert same(before, rig.snapshot(without=runs))


def test_a_later_part_of_a_prefix_is_asked_for_as_such(open_rig: Callable[..., MoverRig]) -> None:
    asked: list[Batch] = []

    def watch(what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        asked.append(args[0])
        return call()

    rig = open_rig(FaultyTier(store=watch), read_threads=1)
    chain = make_chain(12)
    rig.keep(chain)
    assert rig.end(rig.promote(chain[2:], chunks(0, 10), chain=chain[:2], ticket="t")) == 10
    keys = [each.key for each in chain]
    for batch in asked:
        start = keys.index(batch.items[0].object.key)
        assert batch.chain == tuple(keys[:start]) and batch.ticket == "t"
        assert [item.object.key for item in batch.items] == keys[start : start + len(batch.items)]
    assert sum(len(batch.items) for batch in asked) == 10


def test_all_memory_lies_in_what_the_store_was_shown(open_rig: Callable[..., MoverRig]) -> None:
    sites: list[StoreSite] = []
    batches: list[Batch] = []

    class Watching(FaultyTier):
        def open_store(self, site: StoreSite) -> Any:
            sites.append(site)
            return super().open_store(site)

    def watch(what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if args:
            batches.append(args[0])
        return call()

    rig = open_rig(Watching(store=watch))
    chain = make_chain(6)
    rig.put(chain, chunks(0, 6))
    assert rig.end(rig.demote(chain, chunks(0, 6))) == 6
    assert rig.end(rig.promote(chain, [(3, 6 * CHUNK - 3)], skip=3)) == 6
    regions = [(region.ctypes.data, region.ctypes.data + region.nbytes) for region in sites[0].memory]
    assert sites[0].format is rig.form
    for batch in batches:
        for item in batch.items:
            assert item.header.ctypes.data % 4096 == 0 and item.header.nbytes == rig.form.header_bytes
            for piece in item.buffers:
                start, stop = piece.ctypes.data, piece.ctypes.data + piece.nbytes
                assert any(lo <= start and stop <= hi for lo, hi in regions)
            assert [sum(piece.nbytes for piece in pieces) for pieces in item.layers] == [
                item.object.blocks * size for size in PAGE_BYTES
            ]


def test_threads_never_share_memory(open_rig: Callable[..., MoverRig]) -> None:
    hangs = Hangs("read", "write")
    batches: list[Batch] = []

    def watch(what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if args:
            batches.append(args[0])
        return hangs(what, call, args)

    rig = open_rig(FaultyTier(store=watch), FaultyTier(store=watch), read_threads=2, write_threads=2)
    chain = make_chain(1)
    for tier in range(2):
        rig.keep(chain, tier=tier)
    jobs = []
    for number in range(2):
        for tier in range(2):
            jobs.append(rig.promote(chain, [(16 * number + 8 * tier, 1)], skip=3, tier=tier))
            jobs.append(rig.demote(chain, [(16 * number + 8 * tier + 1, 4)], tier=tier))
    wait_until(lambda: len(batches) == 8)
    spans = sorted(
        (piece.ctypes.data, piece.ctypes.data + piece.nbytes)
        for batch in batches
        for item in batch.items
        for piece in item.buffers
    )
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    hangs.let_go()
    for job in jobs:
        rig.end(job)


def test_a_missing_object_ends_the_job(rig: MoverRig) -> None:
    chain = make_chain(6)
    rig.keep([*chain[:3], *chain[4:]])
    assert rig.end(rig.promote(chain, chunks(0, 6))) == 3
    assert rig.holds(chain[:3], chunks(0, 3))
    assert rig.traffic[0].missing_objects == 3 and rig.traffic[0].read_objects == 3 and not rig.traffic[0].failures


def flip(item: Item) -> None:
    item.layers[-1][-1][-1] ^= 1


def truncate(item: Item) -> None:
    for pieces in item.layers[1:]:
        for piece in pieces:
            piece[:] = 0


def be_another(item: Item) -> None:
    for piece in item.buffers:
        np.copyto(piece, np.roll(piece, 1))


def forget_header(item: Item) -> None:
    item.header[:] = 0


def garble_header(item: Item) -> None:
    item.header[:] = np.frombuffer((b"\xff\x00[{" * (item.header.nbytes // 4)), dtype=np.uint8)


def nest_header(item: Item) -> None:
    text = b'{"a":' + b"[" * (item.header.nbytes - 32)
    item.header[:8] = np.frombuffer((item.header.nbytes - 8).to_bytes(8, "little"), dtype=np.uint8)
    item.header[8 : 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)


LIES = [flip, truncate, be_another, forget_header, garble_header, nest_header]


@pytest.mark.parametrize("lie", LIES)
def test_wrong_bytes_are_never_reported_as_moved(
    rig: MoverRig, lie: Callable[[Item], None], caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(2)
    rig.keep(chain)
    rig.tiers[0].store = Lies(lie)
    assert rig.end(rig.promote(chain[1:], chunks(0, 1), chain=chain[:1])) == 0
    traffic = rig.traffic[0]
    assert (traffic.damaged_objects, traffic.read_objects, traffic.read_bytes) == (1, 0, 0)
    assert (traffic.missing_objects, traffic.failures) == (0, 0)
    assert rig.keeps(chain) == [True, False], "what is damaged is removed, and nothing else"
    assert "wrong object" in caplog.text and chain[1].key.hex()[:12] in caplog.text


def test_objects_behind_a_damaged_one_do_not_count(open_rig: Callable[..., MoverRig]) -> None:
    for victim in range(4):
        rig = open_rig(FaultyTier(store=Lies(flip, victim=victim)), read_threads=1)
        chain = make_chain(4)
        rig.keep(chain)
        assert rig.end(rig.promote(chain, chunks(0, 4))) == victim
        assert rig.holds(chain[:victim], chunks(0, victim)) if victim else True
        assert rig.traffic[0].damaged_objects == 1 and rig.traffic[0].read_objects == victim
        assert rig.keeps(chain) == [number != victim for number in range(4)]


def test_another_objects_bytes_under_the_right_key_do_not_count(rig: MoverRig) -> None:
    one, two = make_chain(1), make_chain(1, prompt="two")
    rig.keep([*one, *two])
    shelf = rig.tiers[0].inner
    shelf.kept[one[0].key] = dict(shelf.kept[two[0].key])
    assert rig.end(rig.promote(one, chunks(0, 1))) == 0
    assert rig.traffic[0].damaged_objects == 1


def test_a_store_that_claims_to_have_read_what_it_did_not_is_not_believed(open_rig: Callable[..., MoverRig]) -> None:
    rig = open_rig(read_threads=1)
    chain = make_chain(1)
    rig.keep(chain)
    assert rig.end(rig.promote(chain, chunks(0, 1))) == 1

    def claim(what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        return len(args[0].items)

    rig.tiers[0].store = claim
    for slot in (4, 0):
        assert rig.end(rig.promote(chain, chunks(slot, 1))) == 0


def test_a_store_that_cannot_remove_what_is_damaged_costs_no_more(
    rig: MoverRig, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(1)
    rig.keep(chain)
    lies, fails = Lies(flip), Fails(only=["remove"])
    rig.tiers[0].store = lambda what, call, args: lies(what, lambda: fails(what, call, args), args)
    assert rig.end(rig.promote(chain, chunks(0, 1))) == 0
    assert fails.calls == 1
    assert rig.traffic[0].damaged_objects == 1 and not rig.traffic[0].failures


def test_what_a_tier_does_not_take_is_counted_as_refused(open_rig: Callable[..., MoverRig]) -> None:
    rig = open_rig(FaultyTier(store=Answers(lambda count: max(0, count - 2), "write")))
    chain = make_chain(5)
    assert rig.end(rig.demote(chain, chunks(0, 5))) == 3
    traffic = rig.traffic[0]
    assert (traffic.written_objects, traffic.refused_objects, traffic.failures) == (3, 2, 0)
    assert traffic.written_bytes == 3 * rig.form.nbytes(CHUNK)


@pytest.mark.parametrize("answer", [None, True, -1, 99, "2", 1.0, TierError("returned, not raised")])
@pytest.mark.parametrize("kind", [JobKind.PROMOTE, JobKind.DEMOTE])
def test_a_count_that_is_none_is_a_failure(rig: MoverRig, kind: JobKind, answer: object) -> None:
    chain = make_chain(2)
    rig.keep(chain)
    rig.tiers[0].store = Answers(lambda _: answer)
    assert rig.end(rig.submit(rig.job(kind, chain, chunks(0, 2)))) == 0
    reads = kind is JobKind.PROMOTE
    assert rig.traffic[0] == TierTraffic(read_failures=int(reads), write_failures=int(not reads))


@pytest.mark.parametrize("kind", [JobKind.PROMOTE, JobKind.DEMOTE])
@pytest.mark.parametrize("error", [TierError("injected"), OSError(5, "I/O error"), KeyError("x"), SystemExit(1)])
def test_whatever_a_store_raises_ends_the_job_and_nothing_else(
    rig: MoverRig, kind: JobKind, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(3)
    rig.keep(chain)
    rig.put(chain, chunks(0, 3))
    rig.tiers[0].store = Fails(error=error)
    assert rig.end(rig.submit(rig.job(kind, chain, chunks(0, 3)))) == 0
    assert rig.traffic[0].failures == 1
    assert repr(error) in caplog.text and len(caplog.records) == 1
    rig.tiers[0].store = works
    rig.clock.advance(1)
    assert rig.end(rig.submit(rig.job(kind, chain, chunks(0, 3)))) == 3


def test_a_job_that_fails_half_way_keeps_what_it_has_moved(open_rig: Callable[..., MoverRig]) -> None:
    rig = open_rig(read_threads=1, slots=21)
    chain = make_chain(20)
    rig.keep(chain)
    rig.tiers[0].store = Fails(lambda number: number == 2)
    moved = rig.end(rig.promote(chain, chunks(0, 20)))
    assert 0 < moved < 20 and rig.holds(chain[:moved], chunks(0, moved))
    assert rig.traffic[0].read_objects == moved and rig.traffic[0].failures == 1


def test_a_tier_that_failed_is_left_alone_for_a_second(rig: MoverRig) -> None:
    chain = make_chain(1)
    rig.keep(chain)
    fails = rig.tiers[0].store = Fails(only=["read"])
    assert rig.end(rig.promote(chain, chunks(0, 1))) == 0
    for _ in range(10):
        assert rig.end(rig.promote(chain, chunks(0, 1))) == 0
    assert fails.calls == 1 and rig.traffic[0].failures == 11
    assert rig.end(rig.demote(chain, chunks(0, 1))) == 1, "the other direction may work"
    rig.clock.advance(0.999)
    rig.end(rig.promote(chain, chunks(0, 1)))
    assert fails.calls == 1
    rig.clock.advance(0.001)
    rig.end(rig.promote(chain, chunks(0, 1)))
    assert fails.calls == 2


@pytest.mark.parametrize("broken", ["too few pages", "skips too much", "skips less than nothing"])
def test_a_job_that_cannot_be_is_reported_as_failed(rig: MoverRig, broken: str) -> None:
    chain = make_chain(2)
    rig.keep(chain)
    runs, skip = {
        "too few pages": ([(0, 7)], 0),
        "skips too much": ([(0, 4)], 4),
        "skips less than nothing": ([(0, 9)], -1),
    }[broken]
    before = rig.snapshot(without=runs)
    assert rig.end(rig.promote(chain, runs, skip=skip)) <= 1
    assert rig.traffic[0].failures == 1 and same(before, rig.snapshot(without=runs))


def test_a_job_without_objects_is_done_at_once(rig: MoverRig) -> None:
    assert rig.end(rig.promote([], [])) == 0
    assert rig.traffic[0] == TierTraffic()


def test_nothing_is_reported_while_nothing_has_ended(rig: MoverRig) -> None:
    report = Report()
    assert not rig.mover.poll(report) and report == Report()
    hangs = rig.tiers[0].store = Hangs()
    job = rig.promote(make_chain(1), chunks(0, 1))
    assert hangs.reached.wait(30)
    assert not rig.mover.poll(report) and report == Report()
    hangs.let_go()
    assert rig.end(job) == 0


def test_a_hung_tier_holds_up_neither_others_nor_its_other_direction(open_rig: Callable[..., MoverRig]) -> None:
    hangs = Hangs("read")
    rig = open_rig(FaultyTier(store=hangs), FaultyTier())
    chain = make_chain(2)
    for tier in range(2):
        rig.keep(chain, tier=tier)
    hung = rig.promote(chain, chunks(0, 2))
    assert hangs.reached.wait(30)
    assert rig.end(rig.promote(chain, chunks(2, 2), tier=1)) == 2
    assert rig.end(rig.demote(chain, chunks(2, 2))) == 2
    assert hung not in rig.moved
    hangs.let_go()
    assert rig.end(hung) == 2 and rig.holds(chain, chunks(0, 2))


def test_what_waits_behind_a_hung_tier_fails_after_a_while(
    open_rig: Callable[..., MoverRig], caplog: pytest.LogCaptureFixture
) -> None:
    hangs = Hangs("read")
    rig = open_rig(FaultyTier(store=hangs))
    chain = make_chain(1)
    rig.keep(chain)
    hung = [rig.promote(chain, chunks(slot, 1)) for slot in range(2)]
    wait_until(lambda: hangs.held == 2)
    before = rig.snapshot(without=chunks(0, 2))
    waiting = [rig.promote(chain, chunks(slot, 1)) for slot in range(2, 6)]
    rig.clock.advance(9.9)
    rig.poll()
    assert not rig.moved
    rig.clock.advance(0.6)
    rig.poll()
    assert rig.moved == dict.fromkeys(waiting, 0)
    assert rig.traffic[0].failures == 4 and "hangs" in caplog.text
    hangs.let_go()
    assert [rig.end(job) for job in hung] == [1, 1]
    assert same(before, rig.snapshot(without=chunks(0, 2)))


def test_closing_lets_queued_writes_end(open_rig: Callable[..., MoverRig]) -> None:
    hangs = Hangs("write")
    rig = open_rig(FaultyTier(store=hangs))
    chains = [make_chain(2, prompt=prompt) for prompt in range(6)]
    for number, chain in enumerate(chains):
        rig.put(chain, chunks(2 * number, 2))
    jobs = [rig.demote(chain, chunks(2 * number, 2)) for number, chain in enumerate(chains)]
    assert hangs.reached.wait(30)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(rig.mover.close(30)))
    closing.start()
    hangs.let_go()
    closing.join(60)
    assert closed == [True]
    assert [rig.end(job) for job in jobs] == [2] * 6
    assert all(rig.keeps(chain) == [True, True] for chain in chains)
    assert rig.tiers[0].inner.closed["store"] == 1


def test_closing_drops_queued_reads_and_what_is_submitted_later(rig: MoverRig) -> None:
    hangs = rig.tiers[0].store = Hangs("read")
    chain = make_chain(1)
    rig.keep(chain)
    under_way = [rig.promote(chain, chunks(slot, 1)) for slot in range(2)]
    wait_until(lambda: hangs.held == 2)
    queued = [rig.promote(chain, chunks(slot, 1)) for slot in range(2, 5)]
    closing = threading.Thread(target=rig.mover.close, args=(30,))
    closing.start()
    assert [rig.end(job) for job in queued] == [0, 0, 0]
    later = rig.demote(chain, chunks(0, 1))
    assert rig.end(later) == 0
    hangs.let_go()
    closing.join(60)
    assert [rig.end(job) for job in under_way] == [1, 1]
    assert rig.traffic[0].failures == 0


def test_a_hung_tier_is_left_behind_and_said_so(
    open_rig: Callable[..., MoverRig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("layerstream.tiers.mover.GRACE_S", 0.05)
    hangs = Hangs("write", "close")
    rig = open_rig(FaultyTier(store=hangs), FaultyTier())
    chain = make_chain(1)
    stuck = rig.demote(chain, chunks(0, 1))
    assert hangs.reached.wait(30)
    dropped = rig.demote(chain, chunks(1, 1))
    assert not rig.mover.close(0.05)
    assert rig.end(dropped) == 0 and stuck not in rig.moved
    assert (
        "1 objects were not written to tier tier-0" in caplog.text and "tier-0: a call has not returned" in caplog.text
    )
    assert rig.tiers[1].inner.closed["store"] == 1
    hangs.let_go()
    assert rig.end(stuck) == 1
    wait_until(lambda: rig.mover.close(1))
    assert rig.tiers[0].inner.closed["store"] == 1


def test_a_tier_that_cannot_be_opened_leaves_none_open() -> None:
    good = FaultyTier()

    def refuse(site: StoreSite) -> TierStore:
        raise ConfigError("it can never work like this")

    rig = MoverRig()
    with pytest.raises(ConfigError, match="never work"):
        TierMover([("good", good.open_store), ("bad", refuse)], pool=rig.pool, format=rig.form)
    assert good.inner.closed["store"] == 1
    assert rig.mover.close(30)
    rig.pool.close()


def test_a_mover_without_tiers_closes(open_rig: Callable[..., MoverRig]) -> None:
    rig = open_rig()
    mover = TierMover([], pool=rig.pool, format=rig.form)
    assert not mover.poll(Report()) and mover.close(1)


FAULTS: dict[str, Callable[[], Any]] = {
    "always": Fails,
    "each third time": lambda: Fails(lambda number: number % 3 == 0),
    "after a while": lambda: Fails(lambda number: number > 3),
    "flipped bits": lambda: Lies(flip),
    "cut short": lambda: Lies(truncate, victim=1),
    "no header": lambda: Lies(forget_header),
    "None": lambda: Answers(lambda _: None),
    "one fewer": lambda: Answers(lambda count: count - 1, "read", "write"),
    "too many": lambda: Answers(lambda count: count + 1, "read", "write"),
    "works": lambda: works,
}


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["promote", "demote"]), st.integers(0, 1), st.integers(1, 3), st.integers(0, 3)),
        min_size=1,
        max_size=16,
    ),
    st.sampled_from(list(FAULTS)),
)
def test_whatever_goes_wrong_each_job_is_reported_once_and_nothing_wrong_is_moved(
    history: list[tuple[str, int, int, int]], fault: str
) -> None:
    rig = MoverRig(FaultyTier(store=FAULTS[fault]()), FaultyTier(), slots=48)
    chain = make_chain(3)
    for tier in range(2):
        rig.keep(chain[:2], tier=tier)
    jobs: dict[int, tuple[str, list[tuple[int, int]], int, int]] = {}
    for number, (kind, tier, objects, skip) in enumerate(history):
        runs = chunks(3 * number, objects)
        if kind == "demote":
            rig.put(chain[:objects], runs)
            job = rig.demote(chain[:objects], runs, tier=tier)
        else:
            runs = [(12 * number, 4 * objects - skip)]
            job = rig.promote(chain[:objects], runs, tier=tier, skip=skip)
        jobs[job] = (kind, runs, objects, skip)
    for job in jobs:
        rig.end(job)
    rig.poll()
    assert rig.moved.keys() == jobs.keys()
    for job, (kind, runs, objects, skip) in jobs.items():
        moved = rig.moved[job]
        assert 0 <= moved <= objects
        if kind == "promote" and moved:
            assert rig.holds(chain[:moved], [(runs[0][0], 4 * moved - skip)], skip=skip)
    for tier, at in enumerate(rig.tiers):
        at.store = works
        # What a working tier has in the end is right, or was never whole.
        assert all(
            right or each.key not in at.inner.kept
            for each, right in zip(chain, rig.keeps(chain, tier=tier), strict=True)
        )
    assert rig.mover.close(30)
    rig.pool.close()
