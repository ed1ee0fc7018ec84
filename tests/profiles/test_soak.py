from __future__ import annotations

import itertools
import math
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from profiles.soak import __main__ as soak_main
from profiles.soak import run as run_module
from profiles.soak.checks import TOLERANCE, Tally, difference
from profiles.soak.disk import Volume
from profiles.soak.engine import Ask, EngineEndedError, Reply
from profiles.soak.faults import BusyError, Fault, Misfortune
from profiles.soak.run import Plan, Soak
from profiles.soak.traffic import ANSWER_TOKENS, Client, Corpus, Shape, make_corpus
from profiles.soak.watch import Watch, mapped, private_bytes, session

SHAPE = Shape(beginnings=2, beginning_tokens=(3, 5), conversations=4, turns=3, turn_tokens=(2, 4))


def right(ask: Ask) -> Reply:
    """An answer that depends on the whole prompt."""
    draw = random.Random(repr(list(ask.prompt)))
    steps = [{str(token): -5.0 - draw.random() for token in range(10)} for _ in range(ask.tokens)]
    ids = [int(max(step, key=step.__getitem__)) for step in steps]
    return Reply(token_ids=ids, logprobs=steps, cached_tokens=2, ttft_s=0.01)


def answered(ask: Ask) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(right(ask))
    return future


def changed(reply: Reply, step: int, by: float) -> Reply:
    """The same answer with one logprob, not that of the likeliest token, changed."""
    steps = [dict(each) for each in reply.logprobs]
    steps[step][min(steps[step], key=steps[step].__getitem__)] += by
    return replace(reply, logprobs=steps)


REPLY = right(Ask(prompt=[1, 2, 3], tokens=4))


def test_equal_answers_do_not_differ() -> None:
    assert difference(REPLY, REPLY) == 0.0


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("by", [-1e-7, -1e-3])
def test_the_largest_difference_of_any_step_counts(step: int, by: float) -> None:
    assert difference(REPLY, changed(REPLY, step, by)) == pytest.approx(-by, rel=1e-3)


@pytest.mark.parametrize("by", [math.nan, -math.inf])
def test_what_is_no_number_is_wrong(by: float) -> None:
    assert difference(REPLY, changed(REPLY, 2, by)) == math.inf


def test_other_tokens_are_wrong() -> None:
    other = replace(REPLY, token_ids=[*REPLY.token_ids[:-1], 499])
    assert difference(REPLY, other) == math.inf
    assert difference(REPLY, replace(REPLY, logprobs=REPLY.logprobs[:-1])) == math.inf
    strangers = [{str(100 + number): -5.0 for number in range(10)} for _ in range(4)]
    assert difference(REPLY, replace(REPLY, logprobs=strangers)) == math.inf


def test_where_two_tokens_are_equally_likely_either_may_win() -> None:
    steps = [dict(each) for each in REPLY.logprobs]
    best = max(steps[1], key=steps[1].__getitem__)
    second = sorted(steps[1], key=steps[1].__getitem__)[-2]
    steps[1][second] = steps[1][best] - TOLERANCE / 2
    wanted = replace(REPLY, logprobs=steps)
    won = replace(wanted, token_ids=[wanted.token_ids[0], int(second), 0, 0], logprobs=[*steps[:2], {}, {}])
    won.logprobs[2:] = [{str(number): -1.0 for number in range(10)}] * 2
    assert difference(wanted, won) == 0.0


LINES = (
    (
        "LayerStream tiers: promoted 12 blocks; disk read 4.2 MB at 1.20 GB/s, wrote 0 B, 3 missing, 1 damaged; "
        "mooncake read 0 B, wrote 2.1 MB at 0.50 GB/s, 2 refused, 4 failures; 5 requests fell to misses; "
        "7 objects not written; not asked at present: lmcache"
    ),
    "INFO LayerStream tiers: promoted 0 blocks; disk read 2.1 MB, wrote 8.4 MB at 1.00 GB/s",
    "something else",
)


def test_counts_come_from_what_engines_print() -> None:
    tally = Tally()
    for line in LINES:
        tally.printed(line)
    assert tally.tiers["disk"] == {"kB read": 6300, "kB written": 8400, "missing": 3, "damaged": 1}
    assert tally.tiers["mooncake"] == {"kB read": 0, "kB written": 2100, "refused": 2, "failures": 4}
    assert tally.requests == {"promoted blocks": 12, "fell to misses": 5, "objects not written": 7}


def test_the_lines_are_those_that_the_product_prints() -> None:
    from layerstream.metrics import TierCounts, TierTraffic, tiers_line

    traffic = {
        "disk": TierTraffic(read_objects=2, read_bytes=4_200_000, read_seconds=0.01, missing_objects=3),
        "mooncake": TierTraffic(written_bytes=2_100_000, write_seconds=0.1, refused_objects=2, write_failures=4),
    }
    tally = Tally()
    tally.printed(tiers_line(TierCounts(promoted_blocks=4, fell_requests=5, dropped_objects=7), traffic, ill=["disk"]))
    assert tally.tiers["disk"] == {"kB read": 4200, "kB written": 0, "missing": 3}
    assert tally.tiers["mooncake"] == {"kB read": 0, "kB written": 2100, "refused": 2, "failures": 4}
    assert tally.requests == {"promoted blocks": 4, "fell to misses": 5, "objects not written": 7}


def test_a_run_that_shows_nothing_has_failed() -> None:
    tally = Tally()
    for line in LINES:
        tally.printed(line)
    tally.answered(REPLY, REPLY, 3)
    tally.count(tally.faults, "one")
    tally.judge(tiers=["disk"], faults=["one"])
    assert not tally.broken
    tally.judge(tiers=["disk", "mooncake"], faults=["one", "two"])
    assert [line.partition(": ")[2] for line in tally.violations] == [
        "nothing seen: no hit came from tier mooncake",
        "nothing seen: fault 'two' never happened",
    ]


def test_the_same_seed_asks_the_same() -> None:
    first, second = make_corpus(3, SHAPE, answered), make_corpus(3, SHAPE, answered)
    assert [turn.prompt for turn in first.turns] == [turn.prompt for turn in second.turns]
    clients = [Client("3", first) for _ in range(2)]
    asked = [[client.next()[1] for _ in range(50)] for client in clients]
    assert asked[0] == asked[1]
    assert len({ask.salt for ask in asked[0]}) == 3
    assert any(ask.abort_after_s is not None for ask in asked[0])


def test_conversations_grow_from_common_beginnings() -> None:
    corpus = make_corpus(1, SHAPE, answered)
    for conversation in corpus.conversations:
        for one, following in itertools.pairwise(conversation):
            before = one.prompt + one.reference.token_ids
            assert following.prompt[: len(before)] == before
            assert len(following.prompt) > len(before)
    heads = {tuple(conversation[0].prompt[:3]) for conversation in corpus.conversations}
    assert len(heads) == SHAPE.beginnings


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """Not mounted; with 40 files that begin like an object."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    volume = Volume(tmp_path, mib=1)
    for number in range(40):
        file = volume.folder / "v1" / f"{number:02x}" / f"{number:064x}.0.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes((992).to_bytes(8, "little") + bytes(992) + bytes(4000))
    yield volume
    volume.close()


@pytest.mark.parametrize("seed", range(5))
def test_flips_change_one_bit_of_a_number_in_the_pages(disk: Volume, seed: int) -> None:
    before = {path: path.read_bytes() for path in disk.files()}
    disk.flip(random.Random(seed))
    differing = [(old, path.read_bytes()) for path, old in before.items() if path.read_bytes() != old]
    assert 0 < len(differing) < 40
    for old, new in differing:
        (offset,) = [place for place in range(len(old)) if old[place] != new[place]]
        assert offset >= 1000
        assert offset % 4 == 3
        assert old[offset] ^ new[offset] == 0x40


def test_every_fault_of_the_disk_does_something_and_can_be_mended(disk: Volume) -> None:
    def state() -> list[tuple[str, bytes]]:
        return [(str(path), path.read_bytes()) for path in disk.files()]

    for fault in disk.faults(list):
        if fault.name == "disk: no file may grow":
            continue
        before, mode = state(), disk.folder.stat().st_mode
        fault.do(random.Random(1))
        after = disk.folder.stat().st_mode if disk.folder.exists() else 0
        assert (state(), after) != (before, mode), fault.name
        fault.mend()
        if fault.name == "disk: folder removed":
            break
        if "folder" in fault.name:
            assert state() == before


def test_a_limit_on_the_size_of_files_holds_for_others_until_it_is_lifted(disk: Volume, tmp_path: Path) -> None:
    fault = next(one for one in disk.faults(lambda: [os.getpid()]) if one.name == "disk: no file may grow")
    fault.do(random.Random(0))
    try:
        with pytest.raises(OSError, match="too large"):
            (tmp_path / "file").write_bytes(bytes(1 << 20))
    finally:
        fault.mend()
    (tmp_path / "file").write_bytes(bytes(1 << 20))


def test_only_files_that_are_there_together_count_as_used(disk: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.used_bytes() == 40 * 5000
    files = disk.files()
    looks = iter([{files[0]: 3000, files[1]: 5000, files[2]: 1000}, {files[0]: 3000, files[1]: 2000, files[3]: 5000}])
    monkeypatch.setattr(disk, "_sizes", lambda: next(looks))
    assert disk.used_bytes() == 5000


def misfortune(tally: Tally, *faults: Fault) -> Misfortune:
    return Misfortune("thing", faults, seed="1", tally=tally, lasts=(0.0, 0.01), peace=(0.0, 0.01))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_faults_come_one_at_a_time_in_turn_and_are_mended() -> None:
    tally, happened = Tally(), list[str]()
    faults = [
        Fault(name, lambda _, name=name: happened.append(name), lambda name=name: happened.append(f"-{name}"))  # type: ignore[misc]
        for name in "abc"
    ]
    thing = misfortune(tally, *faults)
    thing.start()
    until(lambda: len(happened) > 40)
    thing.stop()
    assert happened[1::2] == [f"-{name}" for name in happened[::2]]
    for first in range(0, 36, 6):
        assert sorted(happened[first : first + 6 : 2]) == ["a", "b", "c"]
    assert sum(tally.faults.values()) == len(happened) // 2


def test_a_fault_that_cannot_be_done_or_mended_fails_the_run_unless_it_is_only_busy() -> None:
    def busy(_: random.Random) -> None:
        raise BusyError

    def never(*_: random.Random) -> None:
        raise RuntimeError("no")

    tally = Tally()
    thing = misfortune(tally, Fault("busy", busy))
    thing.start()
    until(lambda: tally.faults["busy: could not be done"] > 0)
    thing.stop()
    assert not tally.broken
    for fault in (Fault("do", never), Fault("mend", lambda _: None, never)):
        tally = Tally()
        thing = misfortune(tally, fault)
        thing.start()
        until(lambda tally=tally: tally.broken["the run itself"] > 0)  # type: ignore[misc]
        thing.stop()


def test_who_is_spared_meets_no_fault() -> None:
    tally, wrong = Tally(), threading.Event()
    thing = misfortune(tally, Fault("one", lambda _: wrong.set(), wrong.clear))
    thing.start()
    for _ in range(20):
        with thing.spared():
            before = tally.faults["one"]
            time.sleep(0.03)
            assert not wrong.is_set()
            assert tally.faults["one"] == before
        until(lambda before=before: tally.faults["one"] > before)  # type: ignore[misc]
    thing.stop()


class StandIn:
    """Answers at once."""

    def __init__(self) -> None:
        # Of no session: what a killed engine had mapped is removed.
        self.pid = -1
        self.ended = False
        self.killed = 0

    def wait_ready(self) -> None: ...

    def ask(self, ask: Ask) -> Future[Reply]:
        if self.ended:
            future: Future[Reply] = Future()
            future.set_exception(EngineEndedError())
            return future
        return answered(ask)

    def close(self) -> float:
        self.ended = True
        return 0.1

    def kill(self) -> None:
        self.ended = True
        self.killed += 1


class InThisSession(StandIn):
    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getsid(0)


class Wrong(StandIn):
    def ask(self, ask: Ask) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(changed(right(ask), ANSWER_TOKENS - 1, -1e-5))
        return future


class Failing(StandIn):
    def ask(self, ask: Ask) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(replace(right(ask), failed="no room", logprobs=[]))
        return future


class Late(StandIn):
    def ask(self, ask: Ask) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(replace(right(ask), ttft_s=61.0))
        return future


class Hanging(StandIn):
    def ask(self, ask: Ask) -> Future[Reply]:
        return Future()


class Dying(StandIn):
    def ask(self, ask: Ask) -> Future[Reply]:
        self.ended = True
        return super().ask(ask)


class NeverStarting(StandIn):
    def wait_ready(self) -> None:
        raise EngineEndedError("the engine did not start")


class NeverStopping(StandIn):
    def close(self) -> float:
        raise TimeoutError("it did not shut down")


def soak(
    engine: Callable[[], StandIn],
    tmp_path: Path,
    *,
    seconds: float = 0.3,
    ends: tuple[str, ...] = ("killed", "stopped"),
    unfinished: Callable[[], list[Path]] = list,
    used_bytes: int = 0,
) -> tuple[Tally, list[StandIn], list[Sequence[str]]]:
    tally, lives, orders = Tally(), list[StandIn](), list[Sequence[str]]()
    watch = Watch(tally, used_bytes=lambda: used_bytes, cap_bytes=100)

    def start(order: Sequence[str]) -> StandIn:
        orders.append(order)
        lives.append(engine())
        return lives[-1]

    Soak(
        Plan(seconds=seconds, seed=1, life_s=(0.4, 0.4), ends=ends, pause_s=(0.0, 0.005)),
        corpus=CORPUS,
        start=start,
        tiers=("a", "b", "c"),
        misfortunes=(),
        spared=None,
        unfinished=unfinished,
        tally=tally,
        watch=watch,
    ).run()
    watch.stop()
    return tally, lives, orders


CORPUS: Corpus = make_corpus(1, SHAPE, answered)


def test_a_run_in_which_all_is_well_breaks_nothing(tmp_path: Path) -> None:
    tally, lives, orders = soak(StandIn, tmp_path, seconds=2.0)
    assert not tally.broken
    assert tally.requests["served"] > 50
    assert tally.faults["engine: killed"] + tally.faults["engine: stopped"] == len(lives) > 3
    assert abs(tally.faults["engine: killed"] - tally.faults["engine: stopped"]) <= 1
    assert all(life.ended for life in lives)
    assert len({tuple(order) for order in orders}) > 1
    assert tally.to_json()["broken"] == {}


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (Wrong, "wrong answer"),
        (Failing, "request failed"),
        (Late, "late answer"),
        (Dying, "engine ended"),
        (NeverStarting, "engine ended"),
        (Hanging, "hang"),
    ],
)
def test_what_must_not_happen_is_seen(
    engine: Callable[[], StandIn], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "HUNG_S", 0.1)
    tally, _, _ = soak(engine, tmp_path)
    assert set(tally.broken) == {kind}


def test_an_engine_that_does_not_shut_down_is_seen(tmp_path: Path) -> None:
    tally, _, _ = soak(NeverStopping, tmp_path, ends=("stopped",))
    assert set(tally.broken) == {"shutdown"}


def test_a_full_folder_and_unfinished_files_that_stay_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiles.soak.watch.EVERY_S", 0.01)
    monkeypatch.setattr(run_module, "LEFT_OVER_S", 0.01)
    tally, _, _ = soak(StandIn, tmp_path, unfinished=lambda: [Path("x.tmp")], used_bytes=101)
    assert set(tally.broken) == {"byte cap", "left over"}
    tally, _, _ = soak(StandIn, tmp_path, unfinished=iter([[Path("x.tmp")]] + [[]] * 9).__next__, used_bytes=100)
    assert not tally.broken


def test_an_engine_whose_memory_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiles.soak.watch.EVERY_S", 0.01)
    monkeypatch.setattr("profiles.soak.watch.SETTLED_S", 0.1)
    memory = iter([*[100 << 20] * 100, *[400 << 20] * 10_000])
    monkeypatch.setattr("profiles.soak.watch.private_bytes", lambda _: next(memory))
    tally = Tally()
    watch = Watch(tally, used_bytes=lambda: 0, cap_bytes=1)
    watch.begin(1)
    until(lambda: next(memory) > 100 << 20)
    time.sleep(0.1)
    watch.end()
    watch.stop()
    assert set(tally.broken) == {"memory"}
    assert watch.largest_growth == 300 << 20
    assert watch.memory_mib == [[100]]


def test_a_sessions_processes_and_their_memory_are_found() -> None:
    mine = session(os.getsid(0))
    assert os.getpid() in mine
    assert private_bytes([os.getpid()]) > 1 << 20
    assert private_bytes([1 << 22]) == 0


def test_shared_memory_that_a_stopped_engine_leaves_is_seen_and_that_of_a_killed_one_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiles.soak.watch.EVERY_S", 0.01)
    file = tmp_path / "memory"
    monkeypatch.setattr("profiles.soak.watch.mapped", lambda pids: mapped(pids, tmp_path))
    file.write_bytes(bytes(4096))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
        tally, _, _ = soak(InThisSession, tmp_path, ends=("stopped",))
        assert set(tally.broken) == {"left over"}
        tally, _, _ = soak(InThisSession, tmp_path, ends=("killed",))
    assert not tally.broken
    assert not file.exists()


def test_every_hit_is_loaded_however_quick_the_model_is() -> None:
    assert soak_main.OPTIONS["recompute"] == "never"
