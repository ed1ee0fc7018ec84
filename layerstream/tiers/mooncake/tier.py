r"""The Mooncake Store tier: objects in memory that machines of a cluster share, for all engines that use it.

    mooncake_master --rpc_port=50051 --default_kv_lease_ttl=10000
    mooncake_client --master_server_address=HOST:50051 --host=OWN_ADDRESS --port=50052 \\
        --metadata_server=P2PHANDSHAKE --protocol=tcp --global_segment_size="64 GB"

The master knows where objects are; owners (`mooncake_client` on any number of machines, or engines with the option
`segment_gib`) hold them. The store keeps nothing when the master or an object's owner ends, and evicts by itself.

Mooncake has no authentication: whoever reaches the master or an owner can read and write objects, and any peer can
address memory that is registered, the host pool among it. It belongs on a network of one's own.

Mooncake's time limits hold for the whole process (`layerstream.tiers.mooncake.library`): the first Mooncake tier of a
process sets them by its option `timeout_s`, unless the environment has them already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from layerstream.tiers.base import IndexSite, StoreSite, Tier
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.connection import ConnectionSettings, MooncakeConnection
from layerstream.tiers.mooncake.index import MooncakeIndex
from layerstream.tiers.mooncake.library import load_library, ranges_per_call
from layerstream.tiers.mooncake.master import MasterAddress
from layerstream.tiers.mooncake.store import MooncakeStore
from layerstream.tiers.objects import Bytes
from layerstream.tiers.options import read_options

Memory: TypeAlias = tuple[tuple[int, int], ...]
"""Address and bytes of each region that a store was shown."""


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Mooncake Store tier."""

    master: str
    """Address of the `mooncake_master`: "host:port"."""
    metadata: Annotated[str, msgspec.Meta(pattern=r"^(P2PHANDSHAKE|https?://\S+)$")] = "P2PHANDSHAKE"
    """How peers find each other: by themselves, or through the metadata server at this URL. As for the owners."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """As for the owners."""
    device: str = ""
    """RDMA devices to use, separated by commas; empty for all."""
    hostname: str = ""
    """This machine's name or address as the others reach it; empty for its address on the way to the master."""
    segment_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Memory that each rank contributes to the store, in GiB, beside the host pool. Its objects prefer it."""
    timeout_s: Annotated[float, msgspec.Meta(ge=1, le=30)] = 5.0
    """Seconds after which a master or an owner that does not answer has failed."""
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds for which the master protects an object that was found: its option `default_kv_lease_ttl`, which is in
    milliseconds."""


class MooncakeTier(Tier):
    """Objects in a Mooncake Store. See the module for how it is started."""

    kind: ClassVar[str] = "mooncake"
    tails: ClassVar[bool] = True
    medium: ClassVar[str] = "REMOTE"

    def __init__(self, options: MooncakeOptions) -> None:
        self.options = options
        self._master = MasterAddress.parse(options.master)
        self._library = load_library(options.timeout_s)
        self._clients: dict[Memory, list[MooncakeClient]] = {}
        """Memory -> its client, once for each store that uses it."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        return cls(read_options(MooncakeOptions, options))

    def open_index(self, site: IndexSite) -> MooncakeIndex:
        client = self._client()
        client.open()
        return MooncakeIndex(client, site)

    def open_store(self, site: StoreSite) -> MooncakeStore:
        segment_bytes = round(self.options.segment_gib * (1 << 30))
        # Stores of one rank share a client, so that memory is registered and contributed once.
        memory = tuple((region.ctypes.data, region.nbytes) for region in site.memory)
        users = self._clients.setdefault(memory, [])
        client = users[0] if users else self._client(segment_bytes=segment_bytes, memory=site.memory)
        if not users:
            client.open()
        users.append(client)
        return MooncakeStore(
            client,
            site,
            own_memory=segment_bytes > 0,
            ranges=ranges_per_call(),
            lease_s=self.options.lease_s,
            close=partial(self._let_go, memory),
        )

    def _let_go(self, memory: Memory) -> None:
        """One store less uses this memory; with the last one its client is closed."""
        users = self._clients[memory]
        client = users.pop()
        if not users:
            client.close()

    def _client(self, *, segment_bytes: int = 0, memory: Sequence[Bytes] = ()) -> MooncakeClient:
        settings = ConnectionSettings(
            master=self._master,
            metadata=self.options.metadata,
            protocol=self.options.protocol,
            device=self.options.device,
            hostname=self.options.hostname,
            timeout_s=self.options.timeout_s,
            segment_bytes=segment_bytes,
        )
        return MooncakeClient(MooncakeConnection(self._library, settings, memory=memory))

    def __str__(self) -> str:
        return f"{self.kind} ({self._master})"
