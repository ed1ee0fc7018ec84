"""What a calibration found: how long each transfer path takes on one device, by page size, blocks and direction.

Kept as a small JSON file for each device, driver and set of versions, since any of them can move the sizes at which one
path overtakes another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

VERSION = 1
"""Of the file's form; a file of another version counts as absent."""
DEFAULT_PATH = "staged"
MARGIN = 0.95
"""Another path is taken where its time is below this part of the default's: less is within what runs differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRate:
    """One measured point."""

    path: str
    direction: str
    """"load" or "save"."""
    page_bytes: int
    blocks: int
    seconds: float
    """Of one layer among several submitted together, so that it is the device's time or the host's, whichever is
    longer."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes of pages moved in a second."""
        return self.page_bytes * self.blocks / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """Everything measured on one device."""

    device: str
    software: dict[str, str]
    """Driver and versions, by name."""
    roofs: dict[str, float]
    """Direction -> bytes per second of one large copy between pinned memory and the device."""
    rates: tuple[PathRate, ...]

    def page_sizes(self) -> list[int]:
        """Page sizes that were measured, ascending."""
        return sorted({rate.page_bytes for rate in self.rates})

    def fastest_loads(self, page_bytes: int) -> list[tuple[int, str]]:
        """(blocks, path) in ascending order: from so many blocks on, loads of such pages take this path.

        A page size that was not measured is treated as the nearest one that was, by ratio; between two measured numbers
        of blocks the change lies at their geometric mean.
        """
        nearest = min(self.page_sizes(), key=lambda size: abs(math.log(size / page_bytes)))
        by_count: dict[int, dict[str, float]] = {}
        for rate in self.rates:
            if rate.direction == "load" and rate.page_bytes == nearest:
                by_count.setdefault(rate.blocks, {})[rate.path] = rate.seconds
        choice: list[tuple[int, str]] = []
        previous = 0
        for blocks in sorted(by_count):
            seconds = by_count[blocks]
            path = min(seconds, key=seconds.__getitem__)
            if DEFAULT_PATH in seconds and seconds[path] > MARGIN * seconds[DEFAULT_PATH]:
                path = DEFAULT_PATH
            if not choice or choice[-1][1] != path:
                choice.append((math.ceil(math.sqrt(previous * blocks)), path))
            previous = blocks
        return choice

    def fastest_seconds(self, page_bytes: int) -> list[tuple[int, float]]:
        """(Bytes, seconds) of one layer of such pages, for each number of blocks that was measured, by the fastest path
        there; empty if such pages were not measured."""
        found: dict[int, float] = {}
        for rate in self.rates:
            if rate.direction == "load" and rate.page_bytes == page_bytes:
                found[rate.blocks] = min(rate.seconds, found.get(rate.blocks, math.inf))
        return [(blocks * page_bytes, seconds) for blocks, seconds in sorted(found.items())]

    def joined(self, others: Iterable[PathRate]) -> RateTable:
        """With more points; a newer one replaces what was measured at the same place."""
        points = {(r.path, r.direction, r.page_bytes, r.blocks): r for r in (*self.rates, *others)}
        return replace(self, rates=tuple(points[key] for key in sorted(points)))

    def write(self, folder: Path) -> Path:
        """Write the table's file into `folder`, at once or not at all; returns its path.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        target = rate_file(folder, self.device, self.software)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".rates-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **asdict(self)}, file, indent=1)
        Path(temporary).replace(target)
        return target


def rate_file(folder: Path, device: str, software: dict[str, str]) -> Path:
    """Where the table of a device is kept in `folder`."""
    identity = json.dumps([device, software], sort_keys=True).encode()
    return folder / f"rates-{hashlib.blake2b(identity, digest_size=8).hexdigest()}.json"


def read_rates(folder: Path, device: str, software: dict[str, str]) -> RateTable | None:
    """The table kept in `folder` for a device; None if there is none, or none that can be read."""
    try:
        data = json.loads(rate_file(folder, device, software).read_text(encoding="utf-8"))
        if data.pop("version") != VERSION or (data["device"], data["software"]) != (device, software):
            return None
        rates = tuple(PathRate(**rate) for rate in data.pop("rates"))
        return RateTable(rates=rates, **data) if rates else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def measured_roof(folder: Path, kind: str, direction: str) -> float | None:
    """Bytes per second of large copies, of any table kept in `folder` whose device's name has the word `kind`, in upper
    or lower case; None if there is none."""
    for path in sorted(folder.glob("rates-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            words = re.split(r"\W+", data["device"].lower())
            if data["version"] == VERSION and kind.lower() in words:
                return float(data["roofs"][direction])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return None
