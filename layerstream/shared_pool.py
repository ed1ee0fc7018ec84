"""Memory for one host pool of several ranks on one machine whose KV is the same: replicas of MLA's or of few KV heads.

The first of the replicas makes a file of memory that has no name, and the others open it by way of the first one's
process: nothing is left behind, however they end. The first alone writes; all of them read.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.errors import PoolError

logger = logging.getLogger(__name__)

Exchange = Callable[[Any], Sequence[Any]]
"""Gives a picklable value to all ranks, and has theirs, in the order of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ranks that hold the same KV."""

    count: int
    """So many consecutive ranks of the tensor-parallel group do."""
    rank: int
    """This one's place in the tensor-parallel group."""
    exchange: Exchange
    """Reaches all of that group, which calls it at once."""


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a rank says about itself."""

    machine: str
    """Equal for processes that see each other."""
    pid: int
    file: int
    """Descriptor of the memory it would share."""
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShare:
    """One rank's part in a shared pool."""

    file: int
    """Descriptor of the memory; `close` gives it up."""
    budget_bytes: int
    """The first replica's, so that all of them lay out the same pool."""
    writes: bool
    """Whether this rank is the first replica."""

    def map(self, segments: int, nbytes: int) -> list[mmap.mmap]:
        """Map all segments, of `nbytes` each, a multiple of the memory page.

        Raises:
            OSError: the system refuses.
        """
        # Each rank asks for the same size, so it does not matter which one comes first.
        os.ftruncate(self.file, segments * nbytes)
        return [mmap.mmap(self.file, nbytes, flags=mmap.MAP_SHARED, offset=i * nbytes) for i in range(segments)]

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays."""
        os.close(self.file)


def share_pool(budget_bytes: int, replicas: Replicas) -> PoolShare | None:
    """Agree with the other replicas on one pool. All ranks of the tensor-parallel group call it at once.

    Args:
        budget_bytes: what this rank would take.
        replicas: this rank's.

    Returns:
        None if they are on several machines, or cannot reach each other's memory: each then has a pool of its own.

    Raises:
        PoolError: the system has no such files.
    """
    try:
        mine = os.memfd_create("layerstream-pool", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        raise PoolError(f"the system cannot share memory between processes ({error}); Linux is needed") from error
    offer = _Offer(machine=_machine(), pid=os.getpid(), file=mine, budget_bytes=budget_bytes)
    first = replicas.rank - replicas.rank % replicas.count
    group = slice(first, first + replicas.count)
    share = _join(replicas.exchange(offer)[group], mine, writes=replicas.rank == first)
    agreed = all(replicas.exchange(share is not None)[group])
    if share is None or not agreed:
        logger.warning(
            "LayerStream: %d ranks with the same KV are on several machines, or may not see each other's memory; each "
            "keeps a pool of its own",
            replicas.count,
        )
        for file in {mine, *(() if share is None else (share.file,))}:
            os.close(file)
        return None
    if share.file != mine:
        os.close(mine)
    return share


def _join(offers: Sequence[_Offer], mine: int, *, writes: bool) -> PoolShare | None:
    first = offers[0]
    if any(offer.machine != first.machine for offer in offers):
        return None
    if writes:
        return PoolShare(file=mine, budget_bytes=first.budget_bytes, writes=True)
    try:
        file = os.open(f"/proc/{first.pid}/fd/{first.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    return PoolShare(file=file, budget_bytes=first.budget_bytes, writes=False)


def _machine() -> str:
    """Names the running system and its process ids as this process sees them."""
    return f"{BOOT_ID.read_text().strip()} {PROCESSES.stat().st_ino}"
