"""The block hashes of vLLM's requests, as the index and tiers need them."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from layerstream.errors import ConfigError
from layerstream.identity import fingerprint_weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class BlockHashes:
    """Keeps a list for each request that only grows and names all that changes the bytes.

    vLLM cuts and rewrites a request's own list when a streaming session goes on, while others may still hold it. And it
    knows a LoRA adapter by its name and path, where another one may lie after a restart: here its weights are in every
    hash.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[bytes], list[bytes]]] = {}
        """Request -> what vLLM said, and what became of it."""
        self._adapters: dict[tuple[str, str, int], bytes] = {}

    def of(self, request: Request) -> list[bytes]:
        """The request's hashes so far: the same list as long as vLLM only adds to its own, another one after that."""
        theirs = request.block_hashes
        said, mine = self._known.get(request.request_id, ([], []))
        # Chained, so the last one speaks for those before it.
        if len(said) > len(theirs) or (said and said[-1] != theirs[len(said) - 1]):
            said, mine = [], []
        if len(theirs) > len(said) or request.request_id not in self._known:
            fresh = theirs[len(said) :]
            said.extend(fresh)
            mine.extend(fresh if request.lora_request is None else self._adapted(fresh, request.lora_request))
            self._known[request.request_id] = (said, mine)
        return mine

    def forget(self, request_id: str) -> None:
        """The request has ended; who holds its list keeps it."""
        self._known.pop(request_id, None)

    def _adapted(self, hashes: list[bytes], lora: LoRARequest) -> list[bytes]:
        # An adapter that was unloaded and is loaded again has another number, and maybe other weights.
        name = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        if name not in self._adapters or getattr(lora, "load_inplace", False):
            self._adapters[name] = self._fingerprint(lora)
        key = self._adapters[name]
        return [hashlib.blake2b(each, digest_size=32, key=key, person=b"ls.lora").digest() for each in hashes]

    def _fingerprint(self, lora: LoRARequest) -> bytes:
        folder = Path(lora.lora_path)
        try:
            found = fingerprint_weights(folder) if folder.is_dir() else None
        except (ConfigError, OSError) as error:
            logger.warning("LayerStream: adapter %s cannot be fingerprinted: %s", lora.lora_name, error)
            found = None
        # Without a fingerprint its KV is found again in this process, and never after it.
        return os.urandom(32) if found is None else bytes.fromhex(found)
