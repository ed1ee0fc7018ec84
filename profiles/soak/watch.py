"""Looks at what an engine uses, while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from profiles.soak.checks import Tally

EVERY_S = 0.5
SETTLED_S = 25.0
"""Seconds after its start in which an engine's memory may still grow as it likes: buffers are made at first use."""
MOST_GROWTH_MIB = 256
"""Memory that an engine may take on afterwards."""
SAMPLE_S = 10.0
SHM = Path("/dev/shm")
MIB = 1 << 20


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == leader:
                    found.append(int(entry.name))
    return found


def private_bytes(pids: list[int]) -> int:
    """Memory of these processes that is in RAM and theirs (RssAnon; without what is mapped from files or shared)."""
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            text = Path("/proc", str(pid), "status").read_text()
            total += int(text.partition("RssAnon:")[2].split()[0]) * 1024
    return total


def mapped(pids: list[int], folder: Path = SHM) -> set[Path]:
    """The files in this folder that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                name = line.partition(f" {folder}/")[2]
                if name:
                    found.add(folder / name.removesuffix(" (deleted)"))
    return found


class Watch:
    """A thread that looks at the folder's size all the time, and at one engine's memory.

    Args:
        tally: told of what does not hold.
        used_bytes: of the disk tier's folder.
        cap_bytes: what it may use.
        services: whether shared memory of this name belongs to a service.
    """

    def __init__(
        self,
        tally: Tally,
        *,
        used_bytes: Callable[[], int],
        cap_bytes: int,
        services: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._services = services
        self._mapped: set[Path] = set()
        self._tally, self._used_bytes, self._cap_bytes = tally, used_bytes, cap_bytes
        self._stop = threading.Event()
        self._engine: int | None = None
        self._since = 0.0
        self._settled = self._most = 0
        self.largest_growth = 0
        """Bytes, of any engine."""
        self.memory_mib: list[list[int]] = []
        """Of each engine, every `SAMPLE_S`."""
        self._sample_at = 0.0
        self.largest_folder = 0
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)
        self._thread.start()

    def begin(self, leader: int) -> None:
        """An engine serves; `leader` is the first process of its session."""
        self._since, self._settled, self._most = time.monotonic(), 0, 0
        self._mapped, self._sample_at = set(), 0.0
        self.memory_mib.append([])
        self._engine = leader

    def end(self) -> None:
        """It is about to end."""
        self._engine = None
        growth = self._most - self._settled if self._settled else 0
        self.largest_growth = max(self.largest_growth, growth)
        if growth > MOST_GROWTH_MIB * MIB:
            self._tally.violation("memory", f"an engine grew by {growth / MIB:.0f} MiB after it had settled")

    def shared_memory(self) -> list[Path]:
        """What is there of the shared memory that the last engine had, and no service."""
        return sorted(path for path in self._mapped if path.exists() and not self._services(path.name))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            used = self._used_bytes()
            self.largest_folder = max(self.largest_folder, used)
            if used > self._cap_bytes:
                self._tally.violation("byte cap", f"the folder has {used} bytes; its cap is {self._cap_bytes}")
            leader = self._engine
            if leader is None:
                continue
            pids = session(leader)
            nbytes, names = private_bytes(pids), mapped(pids)
            if self._engine == leader:
                self._mapped |= names
                if (now := time.monotonic()) >= self._sample_at:
                    self._sample_at = now + SAMPLE_S
                    self.memory_mib[-1].append(nbytes // MIB)
                if time.monotonic() - self._since < SETTLED_S:
                    self._settled = max(self._settled, nbytes)
                self._most = max(self._most, nbytes)
