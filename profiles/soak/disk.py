"""The disk tier's folder, and what may befall it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from layerstream.tiers.disk.unfinished import is_unfinished
from profiles.soak.faults import BusyError, Fault

MIB = 1 << 20
TOP_EXPONENT_BIT = 0x40
"""In the last byte of a little-endian float32: flipped, a number of ordinary size becomes a huge one."""
BUSY_S = 2.0
"""Seconds in which a filesystem that is being written to becomes read-only, or does not."""


class Volume:
    """A folder for the tier, on a small filesystem of its own where this process may mount one.

    Args:
        root: folder for everything.
        mib: size of the filesystem.
    """

    def __init__(self, root: Path, *, mib: int) -> None:
        self.place = root / "volume"
        self.folder = self.place / "kv"
        self._away = self.place / "away"
        self._filler = self.place / "filler"
        self.place.mkdir()
        image = root / "volume.img"
        self.mounted = False
        if os.geteuid() == 0 and shutil.which("mkfs.ext4"):
            with image.open("wb") as file:
                file.truncate(mib * MIB)
            self.mounted = all(
                subprocess.run(command, check=False, capture_output=True).returncode == 0
                for command in (
                    ["mkfs.ext4", "-q", "-F", str(image)],
                    ["mount", "-o", "loop", str(image), str(self.place)],
                )
            )

    def close(self) -> None:
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.place)], check=False, capture_output=True)

    def files(self) -> list[Path]:
        """The objects."""
        return sorted(self._all(lambda name: name.endswith(".safetensors")))

    def unfinished(self) -> list[Path]:
        """Files that are being written, or were."""
        return sorted(self._all(is_unfinished))

    def used_bytes(self) -> int:
        """Of everything in the folder at one moment, at least: what was there before it and is still there after it.
        To look at all of it takes a while, in which files come and go, and the sum would be of files that were never
        there together.
        """
        before, after = self._sizes(), self._sizes()
        return sum(min(nbytes, after.get(path, 0)) for path, nbytes in before.items())

    def _sizes(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for path in self._all(lambda _: True):
            with suppress(OSError):
                found[path] = path.stat().st_size
        return found

    def _all(self, wanted: Callable[[str], bool]) -> Iterator[Path]:
        for place, _, names in os.walk(self.folder):
            yield from (Path(place) / name for name in names if wanted(name))

    def faults(self, engines: Callable[[], Sequence[int]]) -> list[Fault]:
        """What can be done to it here.

        Args:
            engines: the engine's processes.
        """
        made = [
            Fault("disk: files deleted", self.delete),
            Fault("disk: files truncated", self.truncate),
            Fault("disk: files emptied", self.empty),
            Fault("disk: bits flipped", self.flip),
            Fault("disk: headers damaged", self.damage_headers),
            Fault("disk: folder removed", lambda _: shutil.rmtree(self.folder, ignore_errors=True)),
            Fault("disk: folder away", self._move_away, self._move_back),
            Fault("disk: no file may grow", lambda _: _limit(engines(), MIB // 2), lambda: _limit(engines(), None)),
        ]
        if self.mounted:
            made += [
                Fault("disk: full", self._fill, lambda: self._filler.unlink(missing_ok=True)),
                Fault("disk: read-only", lambda _: self._remount("ro"), lambda: self._remount("rw")),
            ]
        elif os.geteuid():
            made.append(Fault("disk: read-only", lambda _: self.folder.chmod(0o500), lambda: self.folder.chmod(0o700)))
        return made

    def delete(self, draw: random.Random) -> None:
        self._harm(draw, 0.3, Path.unlink)

    def truncate(self, draw: random.Random) -> None:
        self._harm(draw, 0.2, lambda path: os.truncate(path, draw.randrange(path.stat().st_size)))

    def empty(self, draw: random.Random) -> None:
        self._harm(draw, 0.1, lambda path: os.truncate(path, 0))

    def flip(self, draw: random.Random) -> None:
        """One bit each, in the pages, such that an answer made from it must show it."""

        def flip(path: Path) -> None:
            with path.open("r+b") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                _flip(file.fileno(), start + 4 * draw.randrange((path.stat().st_size - start) // 4) + 3)

        self._harm(draw, 0.3, flip)

    def damage_headers(self, draw: random.Random) -> None:
        def damage(path: Path) -> None:
            with path.open("r+b") as file:
                _flip(file.fileno(), draw.randrange(600))

        self._harm(draw, 0.2, damage)

    def _harm(self, draw: random.Random, part: float, harm: Callable[[Path], object]) -> None:
        """Do it to some of the files. Those that the engine removes meanwhile, or that are too short, are left out."""
        for path in self.files():
            if draw.random() < part:
                with suppress(FileNotFoundError, ValueError):
                    harm(path)

    def _move_away(self, _: random.Random) -> None:
        with suppress(OSError):
            self.folder.rename(self._away)

    def _move_back(self) -> None:
        """What an engine has made in its place meanwhile is lost."""
        if self._away.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self._away.rename(self.folder)
            shutil.rmtree(self._away, ignore_errors=True)

    def _fill(self, _: random.Random) -> None:
        with self._filler.open("wb") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(MIB))

    def _remount(self, how: str) -> None:
        deadline = time.monotonic() + BUSY_S
        command = ["mount", "-o", f"remount,{how}", str(self.place)]
        while subprocess.run(command, check=False, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise BusyError(f"{' '.join(command)} failed: files are being written")
            time.sleep(0.01)


def _flip(file: int, offset: int) -> None:
    (byte,) = os.pread(file, 1, offset) or (0,)
    os.pwrite(file, bytes((byte ^ TOP_EXPONENT_BIT,)), offset)


def _limit(pids: Sequence[int], nbytes: int | None) -> None:
    """What a file may grow to when these processes write it (RLIMIT_FSIZE)."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))


@contextmanager
def volume(root: Path, *, mib: int) -> Iterator[Volume]:
    made = Volume(root, mib=mib)
    try:
        yield made
    finally:
        made.close()
