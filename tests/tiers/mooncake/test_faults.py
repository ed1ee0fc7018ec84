"""What the tier makes of everything that can happen to a Mooncake Store: a count, or `TierError`, in bounded time, and
never wrong bytes that pass their check."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerstream.errors import ObjectError, TierError
from layerstream.jobs import TierObject
from layerstream.tiers.mooncake import ranges as mooncake_ranges
from tests.rigs.mooncake_engine import PAGE_BYTES, Engine, foreign_writer
from tests.rigs.mooncake_service import TIMEOUT_S, MooncakeService, mooncake_service, until

PATIENCE_S = 30.0
"""Far more than anything here may take, and less than the same calls take where nothing bounds them."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MooncakeService]:
    with mooncake_service(tmp_path, owner_mib=128, client_ttl=2) as started:
        yield started


@contextmanager
def soon(seconds: float = PATIENCE_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


_UNREACHABLE = r"-(800 TRANSFER_FAIL|600 INVALID_PARAMS)"
"""An owner that failed; the second where it was never asked before."""


def eventually(condition: Callable[[], bool]) -> None:
    """It comes true; until then the tier may be ill."""

    def true() -> bool:
        try:
            return condition()
        except TierError:
            return False

    until(true, seconds=PATIENCE_S)


def all_fail(engine: Engine, *, times: int = 3) -> None:
    chain = engine.chain(1, prompt="anything")
    full, empty = engine.full(chain), engine.empty(chain)
    asks: list[Callable[[], Any]] = [
        lambda: engine.index.find(chain), lambda: engine.index.reserve(chain), engine.index.probe,
        lambda: engine.index.remove(chain), lambda: engine.store.read(empty), lambda: engine.store.write(full),
        lambda: engine.store.remove(empty),
    ]  # fmt: skip
    for _ in range(times):
        for ask in asks:
            with pytest.raises(TierError):
                ask()


def before_range(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str, number: int, do: Callable[[], None]
) -> None:
    """`do` happens before the range with this number is moved, or before each if it is negative. Each object is moved
    in five: its header and its layers."""
    monkeypatch.setattr(mooncake_ranges, "RANGE_BYTES", PAGE_BYTES)
    client = engine.store._client
    move, moved = getattr(client, way), [0]

    def moving(*arguments: Any) -> Any:
        if number < 0 or moved[0] == number:
            do()
        moved[0] += 1
        return move(*arguments)

    monkeypatch.setattr(client, way, moving)


def test_a_killed_master_fails_every_call_at_once_and_a_new_one_starts_empty(service: MooncakeService) -> None:
    with Engine(service) as engine:
        chain = engine.chain(2)
        assert engine.store.write(engine.full(chain)) == 2
        service.master.kill()
        with soon():
            all_fail(engine)
        service.restart_master()
        eventually(lambda: engine.index.find(chain).present == (False, False))
        batch = engine.empty(chain)
        eventually(lambda: engine.store.read(batch) == 0)
        eventually(lambda: engine.store.write(engine.full(chain)) == 2)
        assert engine.store.read(batch) == 2 and engine.intact(batch.items)


def test_a_read_under_way_ends_well_without_the_master(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(service) as engine:
        chain = engine.chain(1)
        assert engine.store.write(engine.full(chain)) == 1
        before_range(engine, monkeypatch, "get_range", 1, service.master.kill)
        batch = engine.empty(chain)
        with soon():
            assert engine.store.read(batch) == 1
        assert engine.intact(batch.items)


def test_a_write_whose_master_dies_fails_and_does_not_block_its_key(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(service) as engine:
        chain = engine.chain(1)
        with monkeypatch.context() as patch:
            before_range(engine, patch, "put_range", 1, service.master.kill)
            with soon(), pytest.raises(TierError, match="-900 RPC_FAIL"):
                engine.store.write(engine.full(chain))
        service.restart_master()
        eventually(lambda: engine.store.write(engine.full(chain)) == 1)
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 1 and engine.intact(batch.items)


def test_a_hanging_master_fails_every_call_in_bounded_time(service: MooncakeService) -> None:
    with Engine(service) as engine:
        chain = engine.chain(1)
        assert engine.store.write(engine.full(chain)) == 1
        service.master.hang()
        try:
            with soon():
                all_fail(engine, times=1)
        finally:
            service.master.go_on()
        eventually(lambda: engine.index.find(chain).present == (True,))
        batch = engine.empty(chain)
        eventually(lambda: engine.store.read(batch) == 1)
        assert engine.intact(batch.items)


def test_a_write_that_a_hanging_master_did_not_let_end_is_all_or_nothing(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(service) as engine:
        chain = engine.chain(2)
        with monkeypatch.context() as patch:
            before_range(engine, patch, "put_range", 1, service.master.hang)
            try:
                with soon(), pytest.raises(TierError):
                    engine.store.write(engine.full(chain))
            finally:
                service.master.go_on()
        eventually(lambda: engine.store.write(engine.full(chain, seed=1)) >= 0)
        batch = engine.empty(chain)
        count = engine.store.read(batch)
        assert all(engine.intact([item]) or engine.intact([item], seed=1) for item in batch.items[:count])
        other = engine.chain(1, prompt="other")
        assert engine.store.write(engine.full(other)) == 1


def test_bytes_of_another_object_after_a_restart_of_the_master_do_not_pass(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(service) as reader, Engine(service) as writer:
        chain, others = reader.chain(1), writer.chain(1, prompt="others")
        assert reader.store.write(reader.full(chain)) == 1
        item = reader.empty(chain)

        def restart() -> None:
            service.restart_master()
            eventually(lambda: writer.store.write(writer.full(others)) == 1)

        before_range(reader, monkeypatch, "get_range", 0, restart)
        with soon():
            assert reader.store.read(item) == 1
        assert not reader.intact(item.items)
        with pytest.raises(ObjectError, match="not the one asked for"):
            reader.form.check(chain[0], item.items[0].header, item.items[0].layers, namespace=item.namespace)
        reader.store.remove(item)
        assert reader.index.find(chain).present == (False,)


def test_an_engine_starts_without_a_master_and_finds_it_later(service: MooncakeService) -> None:
    service.master.kill()
    with soon(), Engine(service) as engine:
        all_fail(engine)
        service.restart_master()
        chain = engine.chain(1)
        eventually(lambda: engine.store.write(engine.full(chain)) == 1)
        eventually(lambda: engine.index.find(chain).present == (True,))


@pytest.mark.slow
def test_an_engine_starts_beside_a_hanging_master(service: MooncakeService) -> None:
    service.master.hang()
    try:
        with soon(), Engine(service) as engine:
            all_fail(engine, times=1)
    finally:
        service.master.go_on()


_CLOSE = """
import sys, threading, time
import numpy as np
from layerstream.tiers.base import StoreSite
from layerstream.tiers.mooncake.tier import MooncakeTier
from layerstream.tiers.objects import ObjectFormat

form = ObjectFormat(layers=["a"], page_bytes=[512], chunk_blocks=1, block_tokens=16, rank=0)
tier = MooncakeTier.parse({"master": sys.argv[1], "segment_gib": float(sys.argv[2]), "timeout_s": 2})
store = tier.open_store(StoreSite(format=form, memory=(np.zeros(1 << 20, np.uint8),)))
longest, last = 0.0, time.monotonic()

def tick():
    global longest, last
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now

threading.Thread(target=tick, daemon=True).start()
print("open", flush=True)
sys.stdin.readline()
store.close()
time.sleep(0.1)
print("held" if longest > 6.0 else "closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("state", ["dead", "hanging"])
@pytest.mark.parametrize("segment_gib", [0.0, 0.0625])
def test_closing_without_a_master_does_not_hold_up_the_process(
    service: MooncakeService, state: str, segment_gib: float
) -> None:
    command = [sys.executable, "-c", _CLOSE, service.address, str(segment_gib)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "open\n"
        if state == "dead":
            service.master.kill()
        else:
            service.master.hang()
        with soon():
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == "closed\n"
    finally:
        child.kill()
        child.communicate(timeout=20)
        service.master.go_on()


def test_an_owner_killed_while_it_is_read_fails_the_read_and_its_objects_vanish(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(service) as engine:
        chain = engine.chain(4)
        assert engine.store.write(engine.full(chain)) == 4
        batch = engine.empty(chain)
        with monkeypatch.context() as patch:
            before_range(engine, patch, "get_range", 6, service.owner.kill)
            with soon(), pytest.raises(TierError, match="-800 TRANSFER_FAIL"):
                engine.store.read(batch)
        with soon(), pytest.raises(TierError, match="-800 TRANSFER_FAIL"):
            engine.store.read(batch)
        eventually(lambda: engine.index.find(chain).present == (False,) * 4)
        assert engine.store.read(batch) == 0


@pytest.mark.slow
@pytest.mark.parametrize("segment_gib", [0.0, 0.0625])
def test_an_owner_killed_during_a_bulk_read_fails_the_read(service: MooncakeService, segment_gib: float) -> None:
    pages = (1 << 20,) * 16
    with Engine(service, page_bytes=pages) as writer:
        chain = writer.chain(4)
        assert writer.store.write(writer.full(chain)) == 4
    with Engine(service, page_bytes=pages, segment_gib=segment_gib) as engine:
        batch = engine.empty(chain, pieces=8)

        def read_on() -> None:
            while True:
                assert engine.intact(batch.items[: engine.store.read(batch)])

        threading.Timer(0.01, service.owner.kill).start()
        with soon(), pytest.raises(TierError, match=_UNREACHABLE):
            read_on()
        eventually(lambda: engine.index.find(chain).present == (False,) * 4)
        assert engine.store.read(batch) == 0


def test_writes_after_an_owners_death_fail_then_are_refused_then_go_to_another_owner(service: MooncakeService) -> None:
    with Engine(service) as engine:
        chain = engine.chain(1)
        service.owner.kill()
        with soon(), pytest.raises(TierError, match=_UNREACHABLE):
            engine.store.write(engine.full(chain))
        eventually(lambda: engine.store.write(engine.full(chain)) == 0)
        assert engine.index.find(chain).present == (False,)
        service.add_owner()
        eventually(lambda: engine.store.write(engine.full(chain)) == 1)
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 1 and engine.intact(batch.items)


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_read_that_a_hanging_owner_fails_does_not_land_later(service: MooncakeService, pieces: int) -> None:
    with Engine(service) as engine:
        chain = engine.chain(2)
        assert engine.store.write(engine.full(chain)) == 2
        batch = engine.empty(chain, pieces=pieces)
        assert engine.store.read(batch) == 2
        service.owner.hang()
        try:
            with soon(), pytest.raises(TierError, match="-800 TRANSFER_FAIL"):
                engine.store.read(batch)
            for item in batch.items:
                for piece in item.buffers:
                    piece[:] = 7
        finally:
            service.owner.go_on()
        eventually(lambda: engine.store.write(engine.full(engine.chain(1, prompt="alive"))) == 1)
        time.sleep(0.5)
        assert all((piece == 7).all() for item in batch.items for piece in item.buffers)


@pytest.mark.parametrize(("pieces", "way", "number"), [(1, "put_range", 2), (4, "put_whole", 0)])
def test_a_write_that_a_hanging_owner_fails_reads_its_buffers_no_more(
    service: MooncakeService, monkeypatch: pytest.MonkeyPatch, pieces: int, way: str, number: int
) -> None:
    with Engine(service) as engine:
        mark, chain = engine.chain(1, prompt="mark"), engine.chain(2)
        assert engine.store.write(engine.full(mark)) == 1
        start, stop = _surroundings(engine, mark[0])
        batch = engine.full(chain, pieces=pieces)
        after = np.frombuffer(b"written after the write had failed".ljust(64, b"."), dtype=np.uint8)
        with monkeypatch.context() as patch:
            before_range(engine, patch, way, number, service.owner.hang)
            try:
                with soon(), pytest.raises(TierError, match="-800 TRANSFER_FAIL"):
                    engine.store.write(batch)
                for item in batch.items:
                    for piece in item.buffers:
                        piece[:] = np.tile(after, len(piece) // 64)
            finally:
                service.owner.go_on()
        eventually(lambda: engine.store.read(engine.empty(mark)) >= 0)
        time.sleep(0.5)
        with Path(f"/proc/{service.owner.pid}/mem").open("rb") as memory:
            memory.seek(start)
            found = memory.read(stop - start)
        assert (b'"key":"' + (mark if number == 0 else chain)[0].key.hex().encode()) in found
        assert after.tobytes() not in found
        assert engine.index.find(chain).present == (False, False)


def _surroundings(engine: Engine, each: TierObject) -> tuple[int, int]:
    """Addresses in the owner, around an object that is there."""
    name = engine.name(each)
    place = engine.library().batch_get_replica_desc([name])[name][0].get_memory_descriptor().buffer_descriptor
    address = int(place.buffer_address)
    for line in Path(f"/proc/{engine.service.owner.pid}/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return max(start, address - (8 << 20)), min(stop, address + (8 << 20))
    raise AssertionError("the object is not in the owner's memory")


@pytest.mark.slow
def test_an_owner_that_hangs_before_it_was_ever_asked_is_given_up_after_a_minute(service: MooncakeService) -> None:
    with Engine(service) as engine:
        chain = engine.chain(1)
        service.owner.hang()
        try:
            with soon(100), pytest.raises(TierError, match="-600 INVALID_PARAMS"):
                engine.store.write(engine.full(chain))
        finally:
            service.owner.go_on()
        eventually(lambda: engine.store.write(engine.full(chain)) == 1)


def _memory_around(engine: Engine, prompt: str) -> bytes:
    """What lies in the owner's memory, from its begin to shortly after this prompt's object."""
    name = engine.name(engine.chain(1, prompt=prompt)[0])
    place = engine.library().batch_get_replica_desc([name])[name][0].get_memory_descriptor().buffer_descriptor
    address = int(place.buffer_address)
    pid = engine.service.owner.pid
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            begin = max(start, address - (16 << 20))
            with Path(f"/proc/{pid}/mem").open("rb") as memory:
                memory.seek(begin)
                return memory.read(min(stop, address + (16 << 20)) - begin)
    raise AssertionError("the object is not in the owner's memory")


def test_a_lease_is_renewed_before_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mooncake_service(tmp_path, lease_ms=1000) as service, Engine(service) as engine:
        chain = engine.chain(2)
        assert engine.store.write(engine.full(chain)) == 2
        starts = _count(engine, monkeypatch, "start_get")
        codes: list[int] = []
        before_range(engine, monkeypatch, "get_range", -1, lambda: time.sleep(0.2))
        _watch(engine, monkeypatch, "get_range", codes)
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 2 and engine.intact(batch.items)
        assert len(starts) > 1 and min(codes) > 0


@pytest.mark.slow
def test_a_lease_shorter_than_the_option_says_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mooncake_service(tmp_path, lease_ms=500) as service, Engine(service, lease_s=60) as engine:
        chain = engine.chain(2)
        assert engine.store.write(engine.full(chain)) == 2
        codes: list[int] = []
        before_range(engine, monkeypatch, "get_range", -1, lambda: time.sleep(0.15))
        _watch(engine, monkeypatch, "get_range", codes)
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 2 and engine.intact(batch.items)
        assert -707 in codes


@pytest.mark.slow
def test_leases_too_short_to_read_anything_fail_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mooncake_service(tmp_path, lease_ms=20) as service, Engine(service) as engine:
        chain = engine.chain(1)
        assert engine.store.write(engine.full(chain)) == 1
        before_range(engine, monkeypatch, "get_range", -1, lambda: time.sleep(0.1))
        with soon(), pytest.raises(TierError, match="start mooncake_master with a longer --default_kv_lease_ttl"):
            engine.store.read(engine.empty(chain))


def _count(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> list[Any]:
    calls: list[Any] = []
    _watch(engine, monkeypatch, way, calls)
    return calls


def _watch(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str, results: list[Any]) -> None:
    client = engine.store._client
    call = getattr(client, way)

    def calling(*arguments: Any) -> Any:
        results.append(call(*arguments))
        return results[-1]

    monkeypatch.setattr(client, way, calling)


@pytest.mark.parametrize("segment_gib", [0.0, pytest.param(0.0625, marks=pytest.mark.slow)])
def test_a_writer_that_died_blocks_its_object_only_until_the_master_discards_it(
    tmp_path: Path, segment_gib: float
) -> None:
    with (
        mooncake_service(tmp_path, owner_mib=128, put_start_discard_timeout_sec=1) as service,
        Engine(service, segment_gib=segment_gib) as engine,
    ):
        chain = engine.chain(2)
        with foreign_writer(service, engine.name(chain[0]), engine.size(chain[0])) as writer:
            assert engine.store.write(engine.full(chain)) == 0
            writer.kill()
        assert not engine.index.find(chain).present[0]
        eventually(lambda: engine.store.write(engine.full(chain)) == 2)
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 2 and engine.intact(batch.items)


def test_closing_ends_what_a_hanging_owner_holds_up(service: MooncakeService) -> None:
    engine = Engine(service)
    chain = engine.chain(1)
    assert engine.store.write(engine.full(chain)) == 1
    service.owner.hang()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            engine.store.read(engine.empty(chain))
        except TierError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    try:
        thread.start()
        time.sleep(0.2)
        with soon():
            engine.close()
        thread.join(TIMEOUT_S + 20)
    finally:
        service.owner.go_on()
    assert len(ended) == 1
