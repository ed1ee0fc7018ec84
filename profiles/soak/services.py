"""The real services of the tiers, and what may befall them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.soak.faults import Fault

if TYPE_CHECKING:
    from tests.rigs.lmcache_service import LMCacheService
    from tests.rigs.mooncake_service import MooncakeService

OWNER_MIB = 192
LMCACHE_GIB = 0.25
LEASE_MS = 2000
CLIENT_TTL_S = 3
"""Seconds after which the master takes an owner that is silent for dead."""


def is_lmcache(name: str) -> bool:
    """Whether shared memory of this name is that of an LMCache server, which engines map."""
    return name.startswith("lmcache")


class Services:
    """A Mooncake Store with one owner, and an LMCache server."""

    def __init__(self, mooncake: MooncakeService, lmcache: LMCacheService) -> None:
        self._mooncake, self._lmcache = mooncake, lmcache

    @property
    def tiers(self) -> dict[str, dict[str, Any]]:
        """Their entries in the option `tiers`."""
        lease_s = LEASE_MS / 1000
        return {
            "mooncake": {
                "type": "mooncake", "master": self._mooncake.address, "timeout_s": 2.0, "lease_s": lease_s,
            },
            "lmcache": {"type": "lmcache", "url": self._lmcache.url, "timeout_s": 2.0},
        }  # fmt: skip

    def mooncake_faults(self) -> list[Fault]:
        """What may befall the store. Master and owner are looked up each time: faults replace them."""
        return [
            Fault("mooncake: master killed", lambda _: self._kill(master=True), self._again),
            Fault("mooncake: master restarted", lambda _: self._mooncake.restart_master()),
            Fault("mooncake: master hung", lambda _: self._mooncake.master.hang(), self._go_on),
            Fault("mooncake: owner killed", lambda _: self._kill(owner=True), self._again),
            Fault("mooncake: owner hung", lambda _: self._mooncake.owner.hang(), self._go_on),
            Fault("mooncake: all killed", lambda _: self._kill(master=True, owner=True), self._again),
        ]

    def lmcache_faults(self) -> list[Fault]:
        """What may befall the server."""
        service = self._lmcache
        return [
            Fault("lmcache: server killed", lambda _: service.kill(), service.start),
            Fault("lmcache: server restarted", lambda _: self._restart_lmcache()),
            Fault("lmcache: server hung", lambda _: service.suspend(), service.resume),
        ]

    def _kill(self, *, master: bool = False, owner: bool = False) -> None:
        if owner:
            self._mooncake.owner.kill()
        if master:
            self._mooncake.master.kill()

    def _again(self) -> None:
        if self._mooncake.master.ended:
            self._mooncake.restart_master()
        if self._mooncake.owner.ended:
            self._mooncake.add_owner(wait=False)

    def _go_on(self) -> None:
        self._mooncake.master.go_on()
        self._mooncake.owner.go_on()

    def _restart_lmcache(self) -> None:
        self._lmcache.kill()
        self._lmcache.start()


@contextmanager
def services(root: Path) -> Iterator[Services]:
    """Started; ended whatever happens."""
    from tests.rigs.lmcache_service import LMCacheService
    from tests.rigs.mooncake_service import MooncakeService

    mooncake = MooncakeService(root, owner_mib=OWNER_MIB, lease_ms=LEASE_MS, client_ttl=CLIENT_TTL_S)
    lmcache = LMCacheService(root, gib=LMCACHE_GIB)
    try:
        lmcache.start()
        yield Services(mooncake, lmcache)
    finally:
        # Ended politely it removes its memory; a stopped process would not hear of it.
        with suppress(AssertionError, OSError):
            lmcache.stop()
        for process in (*mooncake.owners, mooncake.master):
            process.go_on()
        mooncake.stop()
