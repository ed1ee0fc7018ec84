"""The memory of an LMCache server, mapped into this process."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from layerstream.errors import TierError
from layerstream.first_touch import LOWEST_PRIORITY, TOUCH_BYTES, populate
from layerstream.tiers.objects import Bytes

FOLDER = Path("/dev/shm")
"""Where Linux shows POSIX shared memory (shm_overview(7))."""


class SharedPool:
    """A server's segment, until the server is another: a server that starts makes a new segment under the old name.

    Holding it open keeps its file's number from being given to another, so the number tells whether it is still the
    one. Whoever copies holds on to the memory by the arrays that `slot` returned.

    Args:
        name: the segment, as the server names it.
        nbytes: its size, as the server says.
        copies: whether anything is copied here; otherwise it is only watched, and not mapped.

    Raises:
        TierError: there is no such segment here, or it cannot be mapped.
    """

    def __init__(self, name: str, nbytes: int, *, copies: bool) -> None:
        if not name or nbytes <= 0:
            raise TierError(
                "the LMCache server has no shared memory; start it with --shm-name NAME --no-l1-use-lazy, and with "
                "room for --l1-size-gb in its /dev/shm"
            )
        self.name = name.removeprefix("/")
        if "/" in self.name:
            raise TierError(f"the LMCache server names its shared memory {name!r}, which is no name of a segment")
        self._path = FOLDER / self.name
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TierError(
                f"{self._path}, the LMCache server's shared memory, cannot be opened ({error.strerror}); the server "
                "must run on this machine, under this user, with the same /dev/shm"
            ) from error
        self._stopped = threading.Event()
        self._memory: Bytes | None = None
        status = os.fstat(self._file)
        self.identity = (status.st_dev, status.st_ino)
        """No other segment has it while this one is open."""
        if copies:
            self._map(nbytes, status.st_size)

    @property
    def replaced(self) -> bool:
        """Whether the segment is no longer that of the running server: removed, made anew, or closed here."""
        if self._stopped.is_set():
            return True
        try:
            status = self._path.stat(follow_symlinks=False)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self.identity

    def slot(self, offset: int, nbytes: int) -> Bytes:
        """`uint8[nbytes]` of the segment, which stay mapped as long as somebody has them.

        Raises:
            TierError: they are not in it, or it is closed.
        """
        memory = self._memory
        if memory is None or not 0 <= offset <= offset + nbytes <= len(memory):
            raise TierError(
                f"the LMCache server placed an object at {offset}, outside of its shared memory {self.name}"
            )
        return memory[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of it. Idempotent, and for one thread at a time."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._memory = None
            os.close(self._file)

    def _map(self, nbytes: int, there: int) -> None:
        try:
            # Beyond the end of the file the mapping exists, and the first access ends the process.
            if there < nbytes:
                raise OSError(f"it has {there} bytes, and the server says {nbytes}")
            self._memory = np.frombuffer(mmap.mmap(self._file, nbytes), dtype=np.uint8)
        except OSError as error:
            self.close()
            raise TierError(f"{self._path}, the LMCache server's shared memory, cannot be mapped ({error})") from error
        threading.Thread(
            target=self._touch, args=(self._memory,), name="layerstream-lmcache-touch", daemon=True
        ).start()

    def _touch(self, memory: Bytes) -> None:
        """Map all pages ahead of the first copies, which would spend as long on page faults as on copying."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            for start in range(0, len(memory), TOUCH_BYTES):
                if self._stopped.is_set() or not populate(memory[start : start + TOUCH_BYTES], in_use=True):
                    return
        except OSError:
            # Only an advance: what is missing is mapped by the copies.
            return
