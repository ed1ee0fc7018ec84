from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerstream.tiers.disk import direct as disk_io
from layerstream.tiers.disk.direct import open_direct, read_pieces, use_direct, write_pieces
from layerstream.tiers.objects import Bytes

Call = Callable[[int, Any, int], int]


def pieces_of(sizes: Sequence[int], *, shift: int = 0) -> list[Bytes]:
    """One after another at multiples of 4096, `shift` bytes on."""
    room = np.frombuffer(mmap.mmap(-1, sum(-(-size // 4096) + 1 for size in [*sizes, 0]) * 4096), dtype=np.uint8)
    pieces, start = [], shift
    for size in sizes:
        pieces.append(room[start : start + size])
        start += (-(-size // 4096) + 1) * 4096
    return pieces


def filled(pieces: Sequence[Bytes]) -> bytes:
    for number, piece in enumerate(pieces):
        piece[:] = np.random.default_rng(number).integers(0, 256, len(piece), dtype=np.uint8)
    return b"".join(piece.tobytes() for piece in pieces)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, bool]]:
    """(call, pieces, offset, with O_DIRECT) of everything that was moved, on a disk with sectors of 512 bytes."""
    seen: list[tuple[str, int, int, bool]] = []
    direct: set[int] = set()
    real_fcntl = fcntl.fcntl

    def pretend(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL:
            (direct.add if value & os.O_DIRECT else direct.discard)(file)
            return 0
        return real_fcntl(file, command, value) | (os.O_DIRECT if file in direct else 0)

    for name in ("preadv", "pwritev"):
        real: Call = getattr(os, name)

        def call(file: int, pieces: Any, offset: int, name: str = name, real: Call = real) -> int:
            for piece in pieces if file in direct else []:
                if len(piece) % 512 or np.frombuffer(piece, dtype=np.uint8).ctypes.data % 512:
                    raise OSError(errno.EINVAL, "Invalid argument")
            seen.append((name, len(pieces), offset, file in direct))
            return real(file, pieces, offset)

        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(fcntl, "fcntl", pretend)
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def write(folder: int, pieces: Sequence[Bytes], *, direct: bool = True) -> int:
    file = os.open("file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=folder)
    try:
        if direct:
            use_direct(file)
        return write_pieces(file, pieces)
    finally:
        os.close(file)


def read(folder: int, pieces: Sequence[Bytes], *, direct: bool = True) -> int:
    file = open_direct("file", os.O_RDONLY, folder=folder, direct=direct)
    try:
        return read_pieces(file, pieces)
    finally:
        os.close(file)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("sizes", "shift"),
    [
        ([4096], 0),
        ([4096, 512, 1536, 0, 65536], 0),
        ([4096, 8192, 4096, 37], 0),
        ([37, 4096, 1], 0),
        ([4096] * 5, 3),
        ([512] * 2500, 0),
        ([1] * 1025, 0),
        ([], 0),
        ([0, 0], 0),
    ],
)
def test_what_is_written_is_read(folder: int, tmp_path: Path, sizes: list[int], shift: int, direct: bool) -> None:
    written, arrived = pieces_of(sizes, shift=shift), pieces_of(sizes, shift=shift)
    content = filled(written)
    assert write(folder, written, direct=direct) == len(content)
    assert (tmp_path / "file").read_bytes() == content
    assert read(folder, arrived, direct=direct) == len(content)
    assert b"".join(piece.tobytes() for piece in arrived) == content


def test_pieces_go_past_the_cache_up_to_the_first_that_cannot(
    folder: int, calls: list[tuple[str, int, int, bool]]
) -> None:
    write(folder, pieces_of([4096, 8192, 512, 37, 4096]))
    assert calls == [("pwritev", 3, 0, True), ("pwritev", 2, 12800, False)]


def test_one_call_takes_no_more_pieces_than_the_system_allows(
    folder: int, calls: list[tuple[str, int, int, bool]]
) -> None:
    write(folder, pieces_of([512] * 2049))
    assert calls == [
        ("pwritev", 1024, 0, True),
        ("pwritev", 1024, 1024 * 512, True),
        ("pwritev", 1, 2048 * 512, True),
    ]


def test_addresses_that_do_not_fit_go_through_the_cache(folder: int, calls: list[tuple[str, int, int, bool]]) -> None:
    write(folder, pieces_of([4096, 4096], shift=7))
    assert calls == [("pwritev", 2, 0, False)]


def test_a_file_that_ends_early_says_how_much_came(folder: int) -> None:
    write(folder, pieces_of([4096, 4096]))
    assert read(folder, pieces_of([4096, 8192])) == 8192


@pytest.mark.parametrize("direct", [True, False])
def test_what_the_system_moves_in_part_is_moved_on(folder: int, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    for name in ("preadv", "pwritev"):
        real: Call = getattr(os, name)

        def a_part(file: int, pieces: Any, offset: int, real: Call = real) -> int:
            """Five hundred bytes of the first piece, or the first piece and a sector of the next."""
            if len(pieces) > 1 and offset % 1024 == 0:
                return real(file, [pieces[0], pieces[1][:512]], offset)
            return real(file, [pieces[0][: 500 + 524 * (offset % 1024 == 0)]], offset)

        monkeypatch.setattr(os, name, a_part)
    written, arrived = pieces_of([4096, 8192, 4096, 512]), pieces_of([4096, 8192, 4096, 512])
    content = filled(written)
    assert write(folder, written, direct=direct) == len(content)
    assert read(folder, arrived, direct=direct) == len(content)
    assert b"".join(piece.tobytes() for piece in arrived) == content


def test_a_filesystem_without_direct_access_is_used_without(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_fcntl = os.open, fcntl.fcntl

    def no_open(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    def no_fcntl(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(file, command, value)

    monkeypatch.setattr(os, "open", no_open)
    monkeypatch.setattr(fcntl, "fcntl", no_fcntl)
    written, arrived = pieces_of([4096, 512]), pieces_of([4096, 512])
    content = filled(written)
    assert (write(folder, written), read(folder, arrived)) == (len(content), len(content))
    assert b"".join(piece.tobytes() for piece in arrived) == content


def test_other_errors_pass_through(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, pieces: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_io.os, "pwritev", broken)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="Input/output"):
        write(folder, pieces_of([4096]))
    with pytest.raises(FileNotFoundError):
        open_direct("absent", os.O_RDONLY, folder=folder, direct=True)


def test_an_error_that_direct_access_does_not_explain_passes_through(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(file: int, pieces: Any, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuses)
    with pytest.raises(OSError, match="Invalid argument"):
        write(folder, pieces_of([4096]))
