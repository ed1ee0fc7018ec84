"""The block hashes of vLLM's requests, as the index and tiers need them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from layerstream.errors import ConfigError
from layerstream.identity import fingerprint_weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Known:
    """The hashes of one request."""

    adapter: bytes
    """What named its adapter when it began; empty without one."""
    key: bytes
    """What is in its hashes for that."""
    said: list[bytes] = field(default_factory=list)
    """What vLLM said."""
    mine: list[bytes] = field(default_factory=list)
    """What became of it."""

    def began(self, hashes: Sequence[bytes]) -> bool:
        """Whether vLLM has only added to what it said. Chained, so the last hash speaks for those before it."""
        count = len(self.said)
        return not count or (count <= len(hashes) and self.said[-1] == hashes[count - 1])


class FinerHashes:
    """Names blocks by vLLM's hashes over fewer tokens at a time, as an engine with smaller blocks has them.

    Each is chained over the whole prefix, so a block is named by the last one in it.

    Args:
        tokens: covered by one hash; divides `block_tokens`.
        block_tokens: tokens in a block.
        algorithm: vLLM's `prefix_caching_hash_algo`.
    """

    def __init__(self, *, tokens: int, block_tokens: int, algorithm: str) -> None:
        self._each = block_tokens // tokens
        self._hasher = get_request_block_hasher(tokens, get_hash_fn_by_name(algorithm))
        self._known: dict[str, list[BlockHash]] = {}

    def extend(self, request: Request, *, blocks: int, known: int) -> list[bytes]:
        """Hashes of blocks `known .. blocks - 1`.

        Args:
            request: whose; all tokens of these blocks are known.
            blocks: that vLLM has hashes of.
            known: of these, how many leading ones have the same tokens as when they were last asked for.
        """
        hashes = self._known.setdefault(request.request_id, [])
        del hashes[known * self._each :]
        hashes += self._hasher(cast("Request", _WithHashes(request, hashes)))
        # Tokens behind vLLM's last whole block may change yet.
        return list(hashes[(known + 1) * self._each - 1 : blocks * self._each : self._each])

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._known.pop(request_id, None)


class _WithHashes:
    """A request with other block hashes."""

    def __init__(self, request: Request, block_hashes: list[BlockHash]) -> None:
        self._request, self.block_hashes = request, block_hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class BlockHashes:
    """Keeps a list for each request that only grows and names all that changes the bytes.

    vLLM cuts and rewrites a request's own list when a streaming session goes on, while others may still hold it. And it
    knows a LoRA adapter by its name and path, where another one may lie later: here its weights are in every hash.
    """

    def __init__(self, finer: FinerHashes | None = None) -> None:
        """
        Args:
            finer: names blocks by hashes of fewer tokens than vLLM's own; None: by vLLM's.
        """
        self._finer = finer
        self._requests: dict[str, _Known] = {}
        self._adapters: dict[tuple[str, str, int], bytes] = {}
        """Adapter -> what names it in hashes."""
        self._places: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        """Name and path -> fingerprint of what lay there when last looked at, and what names it in hashes."""

    def of(self, request: Request) -> list[bytes]:
        """The request's hashes so far: the same list as long as vLLM only adds to its own, another one after that, or
        when its adapter's weights change."""
        theirs, known = request.block_hashes, self._requests.get(request.request_id)
        fresh = known is None or len(theirs) > len(known.said)
        adapter = b"" if request.lora_request is None else self._adapter(request.lora_request, look=fresh)
        if known is None:
            known = _Known(adapter=adapter, key=adapter)
        elif known.adapter == known.key != adapter:
            # What it computes with the new weights hangs on what it computed with the old ones: nobody may share it.
            known = _Known(adapter=known.adapter, key=os.urandom(32))
        elif not known.began(theirs):
            known = _Known(adapter=known.adapter, key=known.key)
        self._requests[request.request_id] = known
        if more := theirs[len(known.said) :]:
            named: Sequence[bytes] = more
            if self._finer is not None:
                named = self._finer.extend(request, blocks=len(theirs), known=len(known.said))
            known.said.extend(more)
            known.mine.extend(_keyed(each, known.key) if known.key else each for each in named)
        return known.mine

    def forget(self, request_id: str) -> None:
        """The request has ended; who holds its list keeps it."""
        self._requests.pop(request_id, None)
        if self._finer is not None:
            self._finer.forget(request_id)

    def _adapter(self, lora: LoRARequest, *, look: bool) -> bytes:
        """What names an adapter; `look`: also if it is known and may have been loaded anew."""
        # One that was unloaded and is loaded again has another number, and maybe other weights.
        adapter = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        if adapter not in self._adapters or (look and getattr(lora, "load_inplace", False)):
            self._adapters[adapter] = self._name(lora)
        return self._adapters[adapter]

    def _name(self, lora: LoRARequest) -> bytes:
        """What stands for an adapter in hashes: its fingerprint, if vLLM can have no blocks of another one that was
        there before. It would take those for its own, so what comes after them is found in this process alone."""
        found, place = self._fingerprint(lora), (lora.lora_name, lora.lora_path)
        before, name = self._places.get(place, (found, found))
        if found != before:
            name = os.urandom(32)
        self._places[place] = found, name
        return name

    def _fingerprint(self, lora: LoRARequest) -> bytes:
        folder = Path(lora.lora_path)
        try:
            weights = fingerprint_weights(folder) if folder.is_dir() else None
            if weights is not None:
                # It says how strongly the weights count, and where.
                config = folder / "adapter_config.json"
                return hashlib.blake2b(
                    config.read_bytes() if config.exists() else b"",
                    digest_size=32,
                    key=bytes.fromhex(weights),
                    person=b"ls.adapter",
                ).digest()
        except (ConfigError, OSError) as error:
            logger.warning("LayerStream: adapter %s cannot be fingerprinted: %s", lora.lora_name, error)
        # Without a fingerprint its KV is found again in this process, and never after it.
        return os.urandom(32)


def _keyed(block_hash: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(block_hash, digest_size=32, key=key, person=b"ls.lora").digest()
