r"""The LMCache tier: objects in the memory of an `lmcache server` on this machine, shared by its engines.

    lmcache server --host 127.0.0.1 --port 5555 --supported-transfer-mode engine_driven \
        --shm-name layerstream --no-l1-use-lazy --l1-size-gb 50 --eviction-policy LRU

The server keeps objects in a segment of shared memory; engines copy between it and their host pools themselves, layer
by layer, and only ask the server where. A server chunk is one whole object, header included
(`layerstream.tiers.objects`), so objects shorter than a chunk cannot be kept.

Only processes that may open the segment (same machine, same user, same /dev/shm) can use the tier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Self

import msgspec

from layerstream.errors import ConfigError
from layerstream.tiers.base import IndexSite, StoreSite, Tier
from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.lmcache.index import LMCacheIndex
from layerstream.tiers.lmcache.store import LMCacheStore
from layerstream.tiers.options import read_options

_URL = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})|ipc://\S+")


class LMCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the LMCache tier."""

    url: str
    """Where the server listens: "tcp://HOST:PORT", or "ipc://PATH"."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Seconds after which a question that the server did not answer has failed."""


class LMCacheTier(Tier):
    """Objects in the memory of an `lmcache server`. See the module for how it is started."""

    kind: ClassVar[str] = "lmcache"
    tails: ClassVar[bool] = False
    medium: ClassVar[str] = "REMOTE"

    def __init__(self, options: LMCacheOptions) -> None:
        self.options = options

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        parsed = read_options(LMCacheOptions, options)
        if not (match := _URL.fullmatch(parsed.url)) or int(match["port"] or 1) not in range(1, 1 << 16):
            raise ConfigError(
                f"option 'url' got {parsed.url!r}; allowed: tcp://HOST:PORT or ipc://PATH, where `lmcache server` "
                "listens (its --host and --port)"
            )
        if find_spec("lmcache") is None:
            raise ConfigError("the package lmcache is not installed; pip install 'layerstream[lmcache]'")
        return cls(parsed)

    def open_index(self, site: IndexSite) -> LMCacheIndex:
        return LMCacheIndex(self._client(copies=False), site)

    def open_store(self, site: StoreSite) -> LMCacheStore:
        return LMCacheStore(self._client(copies=True), site)

    def _client(self, *, copies: bool) -> LMCacheClient:
        return LMCacheClient(self.options.url, timeout_s=self.options.timeout_s, copies=copies)

    def __str__(self) -> str:
        return f"{self.kind} ({self.options.url})"
