"""The contract of a tier: where chunks live that the host pool lost, or never had.

A tier keeps *objects* (`layerstream.jobs.TierObject`): all layers of some blocks of one prefix, one object for every
rank, in one format (`layerstream.tiers.objects`) that carries its own checksums. So a tier only has to move bytes: a
tier that loses, mixes up or damages an object costs a recompute, never a wrong answer. Portable objects belong to
groups of KV heads instead of ranks (`layerstream.head_groups`): whatever is said of ranks here goes for groups then.

It has two ends. The scheduler half's (`TierIndex`) finds objects and makes room for them, for all ranks; each worker
half's (`TierStore`) moves the bytes of its own rank. Both may block: neither is ever called from a thread that serves.

An object is visible to `find` and `read` as a whole or not at all, and never changes once it is. Writing one that is
already there is no error and changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from pathlib import Path

    from layerstream.jobs import TierObject
    from layerstream.tiers.objects import Bytes, ObjectFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSite:
    """The engine that a `TierIndex` serves."""

    namespace: bytes
    """`Namespace.digest()`; keys of objects contain it already."""
    chunk_blocks: int
    """Blocks of an object that is not the last of its prefix."""
    block_bytes: tuple[int, ...]
    """For each rank, bytes of one block over all its layers."""
    header_bytes: tuple[int, ...]
    """For each rank, bytes of an object before its pages."""

    @property
    def ranks(self) -> int:
        """Ranks of the engine: an object is there once every rank's is."""
        return len(self.block_bytes)

    def nbytes(self, blocks: int) -> int:
        """Bytes of the objects of all ranks for `blocks` blocks."""
        return sum(self.header_bytes) + blocks * sum(self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSite:
    """The rank that a `TierStore` serves."""

    format: ObjectFormat
    memory: tuple[Bytes, ...]
    """`uint8[n]` regions in which all buffers of all batches lie (the host pool and the headers), for tiers whose
    transport wants memory registered. They stay where they are until the store is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Answer to a lookup."""

    present: tuple[bool, ...]
    """For each object asked about, whether every rank's is there."""
    ticket: str = ""
    """Handed to `TierStore.read` with the objects that are then read, or back through `TierIndex.release`. Empty if
    the tier keeps nothing for a lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How full a tier is, over all ranks."""

    used_bytes: int
    capacity_bytes: int | None
    """None if the tier cannot tell."""
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object and the memory of its bytes: `header`, then for each layer its pieces in order."""

    object: TierObject
    header: Bytes
    """`uint8[header_bytes]`, its address a multiple of 4096."""
    layers: tuple[tuple[Bytes, ...], ...]
    """For each layer of the rank, `uint8[n]` pieces that together are the `blocks` pages of that layer."""

    @property
    def buffers(self) -> list[Bytes]:
        """All pieces in the object's order."""
        return [self.header, *(piece for pieces in self.layers for piece in pieces)]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return sum(piece.nbytes for piece in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive objects of one prefix to move for one rank."""

    namespace: bytes
    chain: tuple[bytes, ...]
    """Keys of the prefix's objects before the first item."""
    items: tuple[Item, ...]
    ticket: str = ""


class TierIndex(ABC):
    """The scheduler half's end of a tier. One background thread makes all calls, and may be kept waiting.

    Every method may raise `TierError` or `OSError`: the tier counts as ill then, and whatever was asked as a miss.
    """

    @abstractmethod
    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        """Which objects are there, complete, for every rank.

        Args:
            chain: the objects of one prefix, from its first on, each of a whole chunk.
            tails: objects that may follow the chain, shorter than a chunk, each instead of the others. Always empty if
                the tier does not keep tails.

        Returns:
            As many answers as `chain` and `tails` together have objects, in that order.
        """

    def release(self, ticket: str) -> None:
        """Nothing will be read with this ticket, or nothing any more. Called once for each ticket, reads or not."""

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        """Which of these objects should be written now: those not there already, for which there is room.

        A tier with a limit makes room here, evicting what was longest not used. Each object with True is followed by
        one `settle`; if it raises, none follows, and none may stay reserved.
        """
        return (True,) * len(objects)

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        """Every rank has ended its write of these reserved objects, and all of them succeeded or not."""

    def remove(self, objects: Sequence[TierObject]) -> None:
        """Forget these objects, of all ranks, where the tier can. Objects that are not there are no error."""

    def watch(self, gone: Callable[[bytes], None]) -> bool:
        """Tell, from here on, of each object that leaves the tier, whoever removed it. Called before anything else.

        Args:
            gone: called with the object's key, in the thread that calls this index, soon after the object has gone. It
                may be called for objects that nobody knows, and more than once for one.

        Returns:
            False if the tier cannot tell.
        """
        return False

    @abstractmethod
    def probe(self) -> None:
        """Ask the tier for a sign of life.

        Raises:
            TierError: there is none.
        """

    def usage(self) -> Usage | None:
        """How full the tier is; None if it cannot tell."""
        return None

    def close(self) -> None:
        """Let go of connections and threads. Idempotent, and soon over even if the tier is dead."""


class TierStore(ABC):
    """One rank's end of a tier. Several I/O threads may be in it at once.

    `read` and `write` may raise `TierError` or `OSError`, which says that the tier is ill; that objects are missing,
    too short, or not taken is no error and shows in the count.
    """

    @abstractmethod
    def read(self, batch: Batch) -> int:
        """Fill the items' buffers with the bytes of their objects, one after another up to the first that is not there.

        What arrived is checked by the caller; the buffers of items beyond the count hold anything.

        Returns:
            How many leading items were filled.
        """

    @abstractmethod
    def write(self, batch: Batch) -> int:
        """Store the items' buffers as objects, each visible only when it is whole.

        The tier no longer reads the buffers when this returns or raises.

        Returns:
            How many leading items are stored now, those that were there before included.
        """

    def remove(self, batch: Batch) -> None:
        """Forget this rank's objects of the batch, whose bytes turned out damaged, where the tier can."""

    def close(self) -> None:
        """Let go of connections, threads and registered memory. Idempotent, and soon over even if the tier is dead."""


class Tier(ABC):
    """A kind of tier with its options, from which both ends are opened. Made once in every process."""

    kind: ClassVar[str]
    """The value of "type" in the option `tiers`."""
    tails: ClassVar[bool] = True
    """Whether it keeps objects shorter than a chunk."""
    medium: ClassVar[str]
    """Where its bytes are, as vLLM's cache events say it: "DISK", "REMOTE", ..."""

    @property
    def folder(self) -> Path | None:
        """Where on this machine its files are; None if it has none here."""
        return None

    @classmethod
    @abstractmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check the options given beside "type" and those common to all tiers.

        Raises:
            ConfigError: an option is unknown or cannot be used, or a package that the tier needs is not installed.
        """

    @abstractmethod
    def open_index(self, site: IndexSite) -> TierIndex:
        """The scheduler half's end. A service that does not answer is no error: calls raise until it does.

        Raises:
            ConfigError: the tier can never work like this.
        """

    @abstractmethod
    def open_store(self, site: StoreSite) -> TierStore:
        """One rank's end; called before the engine serves, once, or once for each group of KV heads of the rank if
        objects are portable. As `open_index` otherwise."""

    def __str__(self) -> str:
        return self.kind
