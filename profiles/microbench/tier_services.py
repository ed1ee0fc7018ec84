"""Where the tiers of a benchmark keep their bytes: a folder on a disk, and the real services."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from layerstream.errors import ConfigError
from profiles.microbench.engine_process import ROOT
from profiles.microbench.machine import filesystem
from tests.rigs.lmcache_service import LMCacheService
from tests.rigs.mooncake_service import MooncakeService

IN_MEMORY = ("tmpfs", "ramfs")


class NotThereError(RuntimeError):
    """This machine lacks what a tier needs; the message says what."""


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A folder on a disk, removed with what is in it: among temporary files, or else in the checkout's `out`.

    Raises:
        NotThereError: both are in memory.
    """
    for place in (Path(tempfile.gettempdir()), ROOT / "out"):
        place.mkdir(exist_ok=True)
        if filesystem(place) not in IN_MEMORY:
            with tempfile.TemporaryDirectory(prefix="layerstream-bench-", dir=place) as folder:
                yield Path(folder)
            return
    raise NotThereError(f"{tempfile.gettempdir()} and {ROOT / 'out'} are in memory; set TMPDIR to a folder on a disk")


@contextmanager
def mooncake(logs: Path, *, owner_mib: int) -> Iterator[MooncakeService]:
    """A Mooncake Store on loopback, whose owner has so much memory.

    Raises:
        NotThereError: it cannot be used, or does not start.
    """
    service: MooncakeService | None = None
    try:
        service = MooncakeService(logs, owner_mib=owner_mib)
        service.tier()
    except (OSError, AssertionError, ConfigError) as error:
        if service is not None:
            service.stop()
        raise NotThereError(f"Mooncake Store: {error}") from error
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def lmcache(logs: Path, *, gib: float) -> Iterator[LMCacheService]:
    """An `lmcache server` on loopback.

    Raises:
        NotThereError: it does not start.
    """
    service = LMCacheService(logs, gib=gib)
    try:
        service.start()
    except (OSError, AssertionError) as error:
        with suppress(OSError):
            service.stop()
        raise NotThereError(f"LMCache: {str(error).splitlines()[0]}") from error
    try:
        yield service
    finally:
        service.stop()
