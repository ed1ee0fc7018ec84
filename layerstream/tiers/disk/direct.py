"""Many pieces of memory from and to one file, past the page cache where that is possible (O_DIRECT)."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any

from layerstream.tiers.objects import Bytes

MAX_PIECES = 1024
"""Pieces in one call: IOV_MAX of Linux (UIO_MAXIOV in its uio.h)."""
SECTOR = 512
"""O_DIRECT needs lengths, addresses and offsets in multiples of the device's logical blocks: 512 bytes or more."""


def open_direct(name: str, flags: int, *, folder: int, direct: bool) -> int:
    """Open a file in an open folder, with O_DIRECT if `direct` is set and the filesystem has it.

    Raises:
        OSError: it cannot be opened.
    """
    if direct:
        try:
            return os.open(name, flags | os.O_DIRECT, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(name, flags, dir_fd=folder)


def use_direct(file: int) -> None:
    """Move what follows past the page cache, if the filesystem can."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def read_pieces(file: int, pieces: Sequence[Bytes]) -> int:
    """Fill `uint8[n]` pieces, one after another, from the beginning of an open file.

    Returns:
        Bytes read: fewer than the pieces hold only if the file ends before.

    Raises:
        OSError: the system says so.
    """
    return _move(os.preadv, file, pieces)


def write_pieces(file: int, pieces: Sequence[Bytes]) -> int:
    """Write `uint8[n]` pieces, one after another, to the beginning of an open file, and return how many bytes.

    Raises:
        OSError: the system says so.
    """
    return _move(os.pwritev, file, pieces)


def _move(call: Callable[[int, Any, int], int], file: int, pieces: Sequence[Bytes]) -> int:
    """As far as pieces fit O_DIRECT, with it if the file has it; from the first that does not, without."""
    left = [piece.data for piece in pieces if len(piece)]
    direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    first = offset = 0
    while first < len(left):
        stop = min(first + MAX_PIECES, len(left))
        if direct:
            stop = next((place for place in range(first, stop) if len(left[place]) % SECTOR), stop)
            if stop == first:
                direct = _through_the_cache(file)
                continue
        try:
            moved = call(file, left[first:stop], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # An address, or the blocks of this device, ask for more than a sector.
            direct = _through_the_cache(file)
            continue
        if not moved:
            break
        offset += moved
        while first < stop and moved >= len(left[first]):
            moved -= len(left[first])
            first += 1
        if moved:
            left[first] = left[first][moved:]
    return offset


def _through_the_cache(file: int) -> bool:
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
