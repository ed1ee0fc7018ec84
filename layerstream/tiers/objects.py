"""The bytes of a tier object: a safetensors file of one tensor for each layer.

    8 bytes     length of the header, little endian
    header      JSON, padded with spaces so that the pages start at a multiple of 4096
    pages       of the first layer, in order of blocks; then of the second, ...

Any safetensors tool reads it. What makes it ours is in the header's metadata: namespace, key, parent, position, rank
and a checksum of each layer. The header has the same length whatever the object, so everything lies at a known offset
before the object is read.

A portable object is the same with tokens in place of blocks: each layer is a tensor `[heads, tokens, row]` in canonical
form (`layerstream.canonical`), whose version is in the metadata, and the rank is the number of its group of heads
(`layerstream.head_groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from layerstream.canonical import VERSION as CANONICAL_VERSION
from layerstream.errors import ObjectError

if TYPE_CHECKING:
    from layerstream.jobs import TierObject

Bytes: TypeAlias = NDArray[np.uint8]
"""`uint8[n]`, contiguous."""

ALIGNMENT = 4096
"""Pages start at a multiple of this: what O_DIRECT asks for at most."""
VERSION = 1
"""Raised whenever an object's bytes change their meaning; objects of other versions are left alone."""
CHECKSUM = "xxh3_64"
"""XXH3 with 64 bits (xxHash, https://xxhash.com): finds damage, and is no defence against forgery."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that safetensors accepts (MAX_HEADER_SIZE in its tensor.rs)."""

_MARK = "layerstream"
_HEX = frozenset("0123456789abcdef")
_DIGITS = 10**10
"""Numbers in the header are below this."""


def checksum(pieces: Sequence[Bytes]) -> int:
    """Of `uint8[n]` pieces read in order."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    return digest.intdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHeader:
    """What an object says of itself."""

    version: int
    namespace: str
    """Hex digest, like the keys."""
    key: str
    parent: str
    start: int
    blocks: int
    tokens: int
    """Tokens in its blocks."""
    rank: int
    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    """For each layer."""
    checksums: tuple[int, ...]
    """For each layer."""
    header_bytes: int
    """Where the pages start."""
    heads: tuple[int, ...] = ()
    """For each layer of a portable object; empty if pages are as their engine has them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return self.header_bytes + self.blocks * sum(self.page_bytes)


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(data: bytes | memoryview) -> ObjectHeader:
    """Read the header at the beginning of an object, of whatever engine.

    Args:
        data: the first bytes of the object, the whole header at least.

    Raises:
        ObjectError: it is not an object of layerstream, of another version, or cut short.
    """
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= length <= MAX_HEADER_BYTES or 8 + length > len(view):
        raise ObjectError("not a safetensors header")
    try:
        entries = msgspec.json.decode(view[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        if metadata.get("format") != _MARK:
            raise ObjectError("a safetensors file, and not one that layerstream wrote")
        version = int(metadata["version"])
        if version != VERSION:
            raise ObjectError(f"written in format version {version}; this release reads {VERSION}")
        canonical = metadata.get("canonical")
        if canonical not in (None, str(CANONICAL_VERSION)):
            raise ObjectError(f"in version {canonical} of the canonical form; this release reads {CANONICAL_VERSION}")
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
        shapes = [_page_shape(tensor, portable=canonical is not None) for tensor in tensors.values()]
        header = ObjectHeader(
            version=version,
            namespace=metadata["namespace"],
            key=metadata["key"],
            parent=metadata["parent"],
            start=int(metadata["start"]),
            blocks=int(metadata["blocks"]),
            tokens=int(metadata["tokens"]),
            rank=int(metadata["rank"]),
            layers=tuple(tensors),
            page_bytes=tuple(heads * size for heads, size in shapes),
            checksums=tuple(int(word, 16) for word in metadata[CHECKSUM].split()),
            header_bytes=8 + length,
            heads=tuple(heads for heads, _ in shapes) if canonical is not None else (),
        )
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise ObjectError(f"its header is damaged ({error})") from error
    if (
        min(header.blocks, *header.page_bytes, *header.heads, 1) < 1
        or header.start < 0
        or min(header.checksums, default=0) < 0
    ):
        raise ObjectError("its header is damaged (numbers that cannot be)")
    if not _HEX.issuperset(header.namespace + header.key + header.parent):
        raise ObjectError("its header is damaged (names are not hexadecimal)")
    offset = 0
    for tensor, size, (heads, row) in zip(tensors.values(), header.page_bytes, shapes, strict=True):
        stop = offset + header.blocks * size
        if tensor != _Tensor("U8", _shape(header.blocks, heads, row, portable=bool(header.heads)), (offset, stop)):
            raise ObjectError("its header is damaged (tensors do not follow each other)")
        offset = stop
    if len(header.checksums) != len(header.layers) or header.header_bytes % ALIGNMENT:
        raise ObjectError("its header is damaged")
    return header


def _page_shape(tensor: _Tensor, *, portable: bool) -> tuple[int, int]:
    """Heads and bytes of each that a tensor has for one of its blocks."""
    if portable:
        heads, _, row = tensor.shape
        return heads, row
    _, size = tensor.shape
    return 1, size


def _shape(blocks: int, heads: int, row: int, *, portable: bool) -> tuple[int, ...]:
    return (heads, blocks, row) if portable else (blocks, row)


class ObjectFormat:
    """The objects of one rank of one engine."""

    def __init__(
        self,
        *,
        layers: Sequence[str],
        page_bytes: Sequence[int],
        chunk_blocks: int,
        block_tokens: int,
        rank: int,
        heads: Sequence[int] = (),
    ) -> None:
        """
        Args:
            layers: the engine's layer names.
            page_bytes: for each layer, bytes of one page.
            chunk_blocks: most blocks in an object.
            block_tokens: tokens in a block.
            rank: whose objects they are.
            heads: of portable objects, for each layer; a block is one token of them then.
        """
        self.layers = tuple(layers)
        self.page_bytes = tuple(page_bytes)
        self.chunk_blocks = chunk_blocks
        self.block_tokens = block_tokens
        self.rank = rank
        self.heads = tuple(heads)
        longest = self._json(
            blocks=chunk_blocks, start=_DIGITS - 1, parent="0" * 64, key="0" * 64, namespace="0" * 64,
            checksums=[(1 << 64) - 1] * len(self.layers),
        )  # fmt: skip
        self.header_bytes = -(-(8 + len(longest)) // ALIGNMENT) * ALIGNMENT
        """Bytes before the pages, a multiple of `ALIGNMENT`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.page_bytes)

    def nbytes(self, blocks: int) -> int:
        """Bytes of an object of `blocks` blocks."""
        return self.header_bytes + blocks * self.block_bytes

    def layer_offsets(self, blocks: int) -> list[int]:
        """Where each layer's pages start in an object of `blocks` blocks."""
        offsets, offset = [], self.header_bytes
        for size in self.page_bytes:
            offsets.append(offset)
            offset += blocks * size
        return offsets

    def write_header(self, out: Bytes, item: TierObject, *, namespace: bytes, checksums: Sequence[int]) -> None:
        """Fill `out`, `uint8[header_bytes]`, for the object `item` whose layers have these checksums."""
        text = self._json(
            blocks=item.blocks, start=item.start, parent=item.parent.hex(), key=item.key.hex(),
            namespace=namespace.hex(), checksums=checksums,
        )  # fmt: skip
        padded = text.ljust(self.header_bytes - 8)
        out[:8] = np.frombuffer(len(padded).to_bytes(8, "little"), dtype=np.uint8)
        out[8:] = np.frombuffer(padded, dtype=np.uint8)

    def check(self, item: TierObject, header: Bytes, layers: Sequence[Sequence[Bytes]], *, namespace: bytes) -> None:
        """Make sure that bytes which came from a tier are those of the object `item`.

        Args:
            item: what was asked for.
            header: `uint8[header_bytes]`, as it arrived.
            layers: for each layer, the `uint8[n]` pieces of its pages.
            namespace: of the engine.

        Raises:
            ObjectError: they are not.
        """
        found = parse_header(header.data)
        said = (found.namespace, found.key, found.start, found.blocks, found.rank, found.page_bytes, found.heads)
        asked = (
            namespace.hex(), item.key.hex(), item.start, item.blocks, self.rank, self.page_bytes, self.heads,
        )  # fmt: skip
        if said != asked or found.header_bytes != self.header_bytes:
            raise ObjectError(f"it is object {found.key[:12]} of rank {found.rank}, and not the one asked for")
        for name, pieces, wanted in zip(self.layers, layers, found.checksums, strict=True):
            if checksum(pieces) != wanted:
                raise ObjectError(f"bytes of layer {name} are damaged")

    def _json(
        self, *, blocks: int, start: int, parent: str, key: str, namespace: str, checksums: Sequence[int]
    ) -> bytes:
        metadata = {
            "format": _MARK,
            "version": str(VERSION),
            "namespace": namespace,
            "key": key,
            "parent": parent,
            "start": str(start),
            "blocks": str(blocks),
            "tokens": str(blocks * self.block_tokens),
            "rank": str(self.rank),
            CHECKSUM: " ".join(f"{value:016x}" for value in checksums),
        }
        if self.heads:
            metadata["canonical"] = str(CANONICAL_VERSION)
        entries: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name, size, heads in zip(self.layers, self.page_bytes, self.heads or (1,) * len(self.layers), strict=True):
            stop = offset + blocks * size
            shape = _shape(blocks, heads, size // heads, portable=bool(self.heads))
            entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [offset, stop]}
            offset = stop
        return msgspec.json.encode(entries)
