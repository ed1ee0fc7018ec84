"""Where an object's pieces are in memory and in the store, in portions that one call moves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.errors import TierError

if TYPE_CHECKING:
    from layerstream.jobs import TierObject
    from layerstream.tiers.base import Item
    from layerstream.tiers.objects import Bytes

RANGE_BYTES = 8 << 20
"""Most bytes in one call, unless a single piece is longer: the lease is watched in between."""


def object_name(each: TierObject, rank: int) -> str:
    """Key of one rank's object in the store."""
    return f"ls1-{each.key.hex()}-{rank}"


@dataclass(slots=True, kw_only=True)
class Range:
    """Some pieces of an object that follow each other in it."""

    pointers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """In the object."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.sizes)


class RegisteredMemory:
    """The regions in which everything that is moved must lie.

    TCP moves other memory as well, and RDMA does not; so that a mistake shows on both, it is an error here.

    Args:
        regions: `uint8[n]` each.
    """

    def __init__(self, regions: Sequence[Bytes]) -> None:
        spans = sorted((region.ctypes.data, region.ctypes.data + region.nbytes) for region in regions)
        self._starts = [start for start, _ in spans]
        self._stops = [stop for _, stop in spans]

    def locate(self, item: Item) -> Range:
        """All pieces of an item. There may be thousands, hence the plain loop.

        Raises:
            TierError: one lies outside.
        """
        pointers, sizes, offsets = [], [], []
        start = stop = offset = 0
        for piece in item.buffers:
            if not (size := len(piece)):
                continue
            pointer = _address(piece.data)
            if not start <= pointer <= stop - size:
                start, stop = self._region(pointer, size)
            pointers.append(pointer)
            sizes.append(size)
            offsets.append(offset)
            offset += size
        return Range(pointers=pointers, sizes=sizes, offsets=offsets)

    def _region(self, pointer: int, size: int) -> tuple[int, int]:
        place = bisect_right(self._starts, pointer) - 1
        if place < 0 or pointer + size > self._stops[place]:
            raise TierError(
                f"Mooncake Store: {size} bytes of an object are at {pointer:#x}, outside the registered memory: "
                "StoreSite.memory must hold all buffers"
            )
        return self._starts[place], self._stops[place]


def _address(memory: memoryview, *, of: Callable[..., c_char] = c_char.from_buffer) -> int:
    """A quarter of the time that numpy's own ways take."""
    return addressof(of(memory))


def portions(whole: Range, most: int) -> list[Range]:
    """Cut an object's pieces into calls, in order.

    The first piece, which is the short header, goes alone: an owner that hangs is found out by one piece's time limit.

    Args:
        whole: the pieces.
        most: of them in one call (`layerstream.tiers.mooncake.library.ranges_per_call`).
    """
    cut: list[Range] = []
    current, nbytes = Range(), 0
    for pointer, size, offset in zip(whole.pointers, whole.sizes, whole.offsets, strict=True):
        full = len(current.sizes) == most or nbytes + size > RANGE_BYTES or not cut
        if current.sizes and full:
            cut.append(current)
            current, nbytes = Range(), 0
        current.pointers.append(pointer)
        current.sizes.append(size)
        current.offsets.append(offset)
        nbytes += size
    if current.sizes:
        cut.append(current)
    return cut
