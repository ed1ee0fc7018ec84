"""What objects are called at an LMCache server.

The server hashes token ids itself, chunk after chunk, and beside them only model name, salt and worker tell users
apart: not LoRA adapters, images, block sizes or weights. Keys of objects name all of that, so a key takes the place of
its chunk's tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from layerstream.errors import TierError

KEY_WORDS = 8
"""An object's key has 32 bytes; the server takes ids of 32 bits (`>I` in LMCache's token_hasher.py)."""

_words = struct.Struct(f">{KEY_WORDS}I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """The objects of one rank, all of one size: what a worker is to the server."""

    namespace: bytes
    rank: int
    nbytes: int
    """Bytes of an object, header included."""

    @property
    def model(self) -> str:
        """The model name to the server. The size is in it since the server's own keys leave it out."""
        return f"layerstream##v1-{self.namespace.hex()}-{self.rank}-{self.nbytes}"


def chunk_ids(keys: Iterable[bytes], chunk_tokens: int) -> tuple[int, ...]:
    """The token ids that stand for a chain of objects: for each its key's words, then zeros up to a server chunk.

    Zeros take a byte each on the wire, where other fillings take five.

    Raises:
        TierError: the server's chunks are too short to hold a key.
    """
    if chunk_tokens < KEY_WORDS:
        raise TierError(
            f"the LMCache server has chunks of {chunk_tokens} tokens; start it with --chunk-size {KEY_WORDS} or more"
        )
    filling = (0,) * (chunk_tokens - KEY_WORDS)
    ids: list[int] = []
    for key in keys:
        ids += _words.unpack(key)
        ids += filling
    return tuple(ids)
