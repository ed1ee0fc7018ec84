"""Files of the disk tier that are being written, and those that a dead process left behind.

Until an object is whole, its file has a name that begins with a dot, and its writer holds a lock on it (flock). The
system drops the lock when the writer dies, however it dies, so whoever gets the lock may remove the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from layerstream.errors import TierError

LOCKLESS_LEFT_OVER_S = 3600.0
"""Age from which an unfinished file is left over on a filesystem that has no locks to tell."""

_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.(0|[1-9][0-9]{0,5})\.[0-9a-f]{16}\.tmp")
_TRIES = 8


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is one of ours that is being written, or was."""
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def create_unfinished(folder: int, key: str, rank: int) -> Iterator[tuple[str, int]]:
    """A new file for one object: its name in the open `folder`, and the file itself, open for writing.

    It is removed if an exception passes through.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(_TRIES):
        name = f".{key}.{rank}.{secrets.token_hex(8)}.tmp"
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            if not _claim(file):
                continue
            try:
                yield name, file
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise
            return
        finally:
            os.close(file)
    raise TierError(f"an unfinished file of object {key[:12]} was taken for left over {_TRIES} times")


def _claim(file: int) -> bool:
    """Lock a file that was just made; False if somebody tidying up was faster, and has removed it or will."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return os.fstat(file).st_nlink > 0


def remove_left_over(folder: int, name: str) -> bool:
    """Remove an unfinished file whose writer is gone; whether it was removed.

    Raises:
        OSError: it cannot be looked at, or not removed.
    """
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            if time.time() - os.fstat(file).st_mtime < LOCKLESS_LEFT_OVER_S:
                return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return True
    finally:
        os.close(file)
