from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerstream.errors import TierError
from layerstream.tiers.disk import unfinished as disk_unfinished
from layerstream.tiers.disk.folder import file_name, parse_name
from layerstream.tiers.disk.unfinished import create_unfinished, is_unfinished, remove_left_over

KEY = "0123456789abcdef" * 4
LEFT_OVER = f".{KEY}.0.{'5' * 16}.tmp"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def test_a_file_keeps_what_is_renamed_and_goes_with_an_exception(folder: int, tmp_path: Path) -> None:
    with create_unfinished(folder, KEY, 3) as (name, file):
        assert is_unfinished(name) and parse_name(name) is None and not is_unfinished(file_name(KEY, 3))
        assert os.fstat(file).st_mode & 0o777 == 0o600
        os.rename(name, "kept", src_dir_fd=folder, dst_dir_fd=folder)
    with pytest.raises(RuntimeError, match="planned"), create_unfinished(folder, KEY, 3):
        raise RuntimeError("planned")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_file_in_use_stays_and_one_of_a_dead_process_goes(folder: int, tmp_path: Path) -> None:
    with create_unfinished(folder, KEY, 0) as (name, _):
        assert not remove_left_over(folder, name)
        assert (tmp_path / name).exists()
    assert remove_left_over(folder, name)
    assert not remove_left_over(folder, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "error"), [("link", errno.ELOOP), ("folder", errno.EISDIR), ("pipe", None)])
def test_what_only_has_the_name_stays(folder: int, tmp_path: Path, what: str, error: int | None) -> None:
    (tmp_path / "other").write_text("x")
    if what == "link":
        (tmp_path / LEFT_OVER).symlink_to(tmp_path / "other")
    elif what == "folder":
        (tmp_path / LEFT_OVER).mkdir()
    else:
        os.mkfifo(tmp_path / LEFT_OVER)
    if error is None:
        assert not remove_left_over(folder, LEFT_OVER)
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            remove_left_over(folder, LEFT_OVER)
    assert {path.name for path in tmp_path.iterdir()} == {"other", LEFT_OVER}


@pytest.mark.parametrize("faster", ["has the lock", "has removed it"])
def test_a_writer_whose_file_is_tidied_away_at_birth_takes_another(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    real = fcntl.flock
    held: list[int] = []

    def tidy_first(file: int, operation: int) -> None:
        if not held:
            name = next(tmp_path.iterdir())
            held.append(os.open(name, os.O_RDWR))
            if faster == "has removed it":
                name.unlink()
            else:
                real(held[0], fcntl.LOCK_EX)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", tidy_first)
    with create_unfinished(folder, KEY, 0) as (name, file):
        os.write(file, b"bytes")
        os.rename(name, "whole", src_dir_fd=folder, dst_dir_fd=folder)
    os.close(held[0])
    assert (tmp_path / "whole").read_bytes() == b"bytes"


def test_a_writer_does_not_try_for_ever(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_unfinished, "_claim", lambda file: False)
    with pytest.raises(TierError, match="was taken for left over 8 times"), create_unfinished(folder, KEY, 0):
        pass


def test_without_locks_only_old_files_are_left_over(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with create_unfinished(folder, KEY, 0) as (name, _):
        pass
    assert not remove_left_over(folder, name)
    os.utime(tmp_path / name, (0, time.time() - 2 * disk_unfinished.LOCKLESS_LEFT_OVER_S))
    assert remove_left_over(folder, name)
