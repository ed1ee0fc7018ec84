from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstream.errors import TierError
from tests.rigs.disk_engine import DiskEngine
from tests.rigs.tier_items import make_batch, make_chain


@pytest.fixture
def engine(tmp_path: Path) -> DiskEngine:
    return DiskEngine(tmp_path / "kv")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fsync", ["never", "data"])
@pytest.mark.parametrize(
    ("page_bytes", "pieces", "shift"), [((4096, 8192), 3, 0), ((37, 4096), 2, 5), ((512,) * 70, 4, 0)]
)
def test_objects_come_back_to_the_byte(
    tmp_path: Path, page_bytes: tuple[int, ...], pieces: int, shift: int, fsync: str, direct: bool
) -> None:
    engine = DiskEngine(tmp_path / "kv", page_bytes=page_bytes, ranks=2, fsync=fsync, direct=direct)
    chain = make_chain(3, tail=1)
    for rank in range(2):
        assert engine.write(chain, rank, pieces=pieces, shift=shift) == 4
    for rank in range(2):
        assert engine.read(chain, rank, pieces=pieces + 1, shift=shift) == [True] * 4
    assert {path.name[0] for path in engine.files()} <= set("0123456789abcdef")


def test_an_object_that_is_there_is_not_written_again(engine: DiskEngine) -> None:
    (each,) = make_chain(1)
    engine.write([each])
    before = engine.file(each).stat()
    assert engine.write([each]) == 1
    after = engine.file(each).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("size", [0, 1, 4096, 4096 + 12288 * 4 - 1, 4096 + 12288 * 4 + 1])
def test_a_file_of_another_size_ends_the_read_and_is_replaced(engine: DiskEngine, size: int) -> None:
    chain = make_chain(3)
    engine.write(chain)
    os.truncate(engine.file(chain[1]), size)
    assert engine.read(chain) == [True]
    assert engine.write(chain) == 3
    assert engine.read(chain) == [True] * 3


@pytest.mark.parametrize("what", ["nothing", "link", "folder", "pipe", "unreadable"])
def test_what_is_no_file_of_ours_is_not_there(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    chain = make_chain(3)
    engine.write(chain)
    path = engine.file(chain[1])
    path.rename(engine.path / "moved")
    if what == "link":
        path.symlink_to(engine.path / "moved")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "unreadable":
        (engine.path / "moved").rename(path)
        fail(monkeypatch, "open", errno.EACCES, when=lambda name, *_: name == path.name)
    assert engine.read(chain) == [True]


def test_a_folder_of_files_that_is_a_link_is_not_followed(engine: DiskEngine, tmp_path: Path) -> None:
    (each,) = make_chain(1)
    engine.write([each])
    shard = engine.file(each).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert engine.read([each]) == []
    assert engine.write([each]) == 0
    engine.file(each).unlink()
    assert engine.write([each]) == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_flipped_bit_is_for_the_reader_to_find(engine: DiskEngine) -> None:
    chain = make_chain(2)
    engine.write(chain)
    content = bytearray(engine.file(chain[1]).read_bytes())
    content[-1] ^= 1
    engine.file(chain[1]).write_bytes(content)
    assert engine.read(chain) == [True, False]
    (damaged,) = engine.items(chain[1:])
    engine.stores[0].remove(make_batch([damaged]))
    assert engine.read(chain) == [True]
    assert engine.write(chain) == 2 and engine.read(chain) == [True, True]


def fail(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    error: int,
    *,
    after: int = 0,
    when: Callable[..., bool] = lambda *_: True,
) -> list[int]:
    """Let a function of `os` fail from its n-th call on, of those that `when` says; the list holds how often it did."""
    real, calls, failed = getattr(os, function), [0], [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            calls[0] += 1
            if calls[0] > after:
                failed[0] += 1
                raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, call)
    return failed


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize("function", ["pwritev", "rename", "mkdir"])
def test_a_disk_that_takes_no_more_refuses_and_still_reads(
    engine: DiskEngine, monkeypatch: pytest.MonkeyPatch, function: str, error: int
) -> None:
    chain = make_chain(4)
    with monkeypatch.context() as patch:
        failed = fail(patch, function, error, after=2)
        assert engine.write(chain) == 2
        assert failed == [1]
    assert sorted(engine.files()) == sorted(map(engine.file, chain[:2]))
    assert engine.read(chain) == [True] * 2
    assert engine.write(chain) == 4 and engine.read(chain) == [True] * 4


@pytest.mark.parametrize("function", ["pwritev", "fdatasync", "fsync"])
def test_a_disk_that_fails_to_write_is_ill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    engine = DiskEngine(tmp_path / "kv", fsync="data")
    chain = make_chain(2)
    with monkeypatch.context() as patch:
        fail(patch, function, errno.EIO, after=1)
        with pytest.raises(TierError, match=r"writing objects in .*kv failed: Input/output error"):
            engine.write(chain)
    assert set(engine.files()) <= {*map(engine.file, chain)}
    assert engine.write(chain) == 2 and engine.read(chain) == [True] * 2


def test_an_object_that_cannot_be_read_is_removed_and_the_disk_is_not_ill(
    engine: DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(3)
    engine.write(chain)
    with monkeypatch.context() as patch:
        fail(patch, "preadv", errno.EIO, after=1)
        assert engine.read(chain) == [True]
    assert len(engine.files()) == 2


def test_a_disk_that_fails_to_open_files_is_ill(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    engine.write(chain)
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EIO, after=1)
        with pytest.raises(TierError, match=r"reading objects in .*kv failed: Input/output error"):
            engine.read(chain)
    assert engine.read(chain) == [True] * 2


def test_less_written_than_given_is_not_stored(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda file, pieces, offset: 0)
        with pytest.raises(TierError, match="wrote less than it was given"):
            engine.write(chain)
    assert engine.files() == []


def test_a_file_size_limit_of_the_process_refuses(engine: DiskEngine) -> None:
    chain = make_chain(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        assert engine.write(chain) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert engine.files() == []
    assert engine.write(chain) == 1


def test_a_folder_that_vanished_is_read_as_empty_and_made_again(engine: DiskEngine) -> None:
    chain = make_chain(2)
    engine.write(chain)
    shutil.rmtree(engine.path)
    assert engine.read(chain) == []
    engine.stores[0].remove(make_batch(engine.items(chain)))
    assert engine.write(chain) == 2 and engine.read(chain) == [True] * 2


def test_a_folder_that_vanishes_amid_a_write_refuses(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(3)
    real = os.pwritev

    def vanish(file: int, pieces: Any, offset: int) -> int:
        shutil.rmtree(engine.path)
        return real(file, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", vanish)
        assert engine.write(chain) == 0
    assert engine.write(chain) == 3 and engine.read(chain) == [True] * 3


def test_an_open_file_is_read_to_its_end_though_it_is_evicted(
    engine: DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = make_chain(1)
    engine.write([each])
    real = os.preadv

    def evict(file: int, pieces: Any, offset: int) -> int:
        engine.file(each).unlink()
        return real(file, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", evict)
        assert engine.read([each]) == [True]
    assert engine.read([each]) == []


def test_removing_goes_on_past_what_is_not_there(engine: DiskEngine) -> None:
    chain = make_chain(4)
    engine.write(chain)
    engine.file(chain[0]).unlink()
    shutil.rmtree(engine.file(chain[1]).parent)
    engine.stores[0].remove(make_batch(engine.items(chain[:3])))
    assert engine.files() == [engine.file(chain[3])]


def test_a_misplaced_file_of_the_right_size_is_found_out_by_its_header(engine: DiskEngine) -> None:
    chain = make_chain(2)
    engine.write(chain[:1])
    engine.file(chain[1]).parent.mkdir(exist_ok=True)
    shutil.copy(engine.file(chain[0]), engine.file(chain[1]))
    assert engine.read(chain) == [True, False]


def test_what_goes_wrong_a_thousand_times_is_one_line(engine: DiskEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            assert engine.read(make_chain(1)) == []
    (line,) = caplog.messages
    assert line.startswith("LayerStream, disk tier: ") and line.endswith("No such file or directory")


def test_no_file_stays_open(engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    engine.write(chain)
    engine.read(chain)
    engine.read(make_chain(2, prompt="absent"))
    for function in ("pwritev", "rename"):
        with monkeypatch.context() as patch:
            fail(patch, function, errno.ENOSPC)
            engine.write(make_chain(2, prompt=function))
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
