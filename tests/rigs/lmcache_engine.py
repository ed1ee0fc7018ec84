"""Both ends of the LMCache tier as one engine has them, and an impostor that speaks to the server in its place."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from layerstream.jobs import TierObject
from layerstream.tiers.base import Item, StoreSite
from layerstream.tiers.lmcache.connection import Protocol
from layerstream.tiers.lmcache.names import ObjectKind, chunk_ids
from layerstream.tiers.lmcache.tier import LMCacheTier
from layerstream.tiers.objects import Bytes, ObjectFormat
from tests.rigs.lmcache_service import LMCacheService
from tests.rigs.tier_items import Room, empty_item, fill, intact, make_batch, make_chain, make_format, make_site


class LMCacheEngine:
    """One rank or several, with a namespace of its own unless given one."""

    def __init__(
        self,
        url: str,
        *,
        page_bytes: Sequence[int] = (512, 512, 1024),
        chunk_blocks: int = 4,
        ranks: int = 1,
        namespace: bytes | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.namespace = namespace or secrets.token_bytes(32)
        self.formats = [make_format(page_bytes, chunk_blocks=chunk_blocks, rank=rank) for rank in range(ranks)]
        tier = LMCacheTier.parse({"url": url, "timeout_s": timeout_s})
        self.index = tier.open_index(make_site(self.formats, self.namespace))
        self.stores = [tier.open_store(StoreSite(format=form, memory=())) for form in self.formats]

    def kind(self, rank: int = 0) -> ObjectKind:
        form = self.formats[rank]
        return ObjectKind(namespace=self.namespace, rank=rank, nbytes=form.nbytes(form.chunk_blocks))

    def chain(self, objects: int, *, prompt: object = 0) -> list[TierObject]:
        blocks = self.formats[0].chunk_blocks
        return make_chain(objects, prompt=prompt, chunk_blocks=blocks, namespace=self.namespace)

    def items(self, objects: Sequence[TierObject], rank: int = 0) -> list[Item]:
        form = self.formats[rank]
        room = Room(sum(form.nbytes(each.blocks) + 4096 * (len(form.layers) + 1) for each in objects) + 4096)
        return [empty_item(form, each, room) for each in objects]

    def full(self, objects: Sequence[TierObject], rank: int = 0, *, seed: int = 0) -> list[Item]:
        form = self.formats[rank]
        return [fill(form, item, namespace=self.namespace, seed=seed) for item in self.items(objects, rank)]

    def write(
        self, chain: Sequence[TierObject], start: int = 0, stop: int | None = None, *, rank: int = 0, seed: int = 0
    ) -> int:
        items = self.full(chain[start:stop], rank, seed=seed)
        return self.stores[rank].write(make_batch(items, chain=chain[:start], namespace=self.namespace))

    def read(
        self, chain: Sequence[TierObject], start: int = 0, stop: int | None = None, *, rank: int = 0, ticket: str = ""
    ) -> list[Item]:
        """The items that the tier says it has filled."""
        items = self.items(chain[start:stop], rank)
        batch = make_batch(items, chain=chain[:start], namespace=self.namespace, ticket=ticket)
        return items[: self.stores[rank].read(batch)]

    def remove(self, chain: Sequence[TierObject], start: int, stop: int) -> None:
        batch = make_batch(self.items(chain[start:stop]), chain=chain[:start], namespace=self.namespace)
        self.stores[0].remove(batch)

    def intact(self, item: Item, rank: int = 0, *, seed: int = 0) -> bool:
        return intact(self.formats[rank], item, namespace=self.namespace, seed=seed)

    def found(self, chain: Sequence[TierObject]) -> int:
        """How many leading objects are found; nothing is kept for it."""
        found = self.index.find(chain)
        if found.ticket:
            self.index.release(found.ticket)
        return sum(found.present)

    def close(self) -> None:
        self.index.close()
        for store in self.stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Impostor:
    """Speaks LMCache's protocol, without any of the tier's care."""

    def __init__(self, service: LMCacheService) -> None:
        self._protocol = Protocol()
        self._context = self._protocol.context()
        self._client: Any = self._protocol.factory.create(service.url, context=self._context)
        self._memory = np.memmap(service.pool, dtype=np.uint8, mode="r+")

    def ask(self, operation: str, *arguments: Any) -> Any:
        return getattr(self._client, operation)(*arguments).result(10)

    def register(self, model: str, nbytes: int) -> int:
        number = secrets.randbits(60)
        payload = self._protocol.registration(
            instance_id=number, model_name=model, world_size=1, block_size=16, num_layers=1, hidden_dim_size=nbytes,
            dtype_str="uint8", use_mla=True, num_physical_slots=1,
        )  # fmt: skip
        self.ask("register_kv_cache_engine_driven_context", payload)
        return number

    def key(self, model: str, chain: Sequence[TierObject]) -> Any:
        tokens = self.ask("get_chunk_size")
        ids = chunk_ids([each.key for each in chain], tokens)
        return self._protocol.key(
            model_name=model, world_size=1, worker_id=0, token_ids=ids, start=0, end=len(ids),
            request_id=secrets.token_hex(8), num_kv_readers=1,
        )  # fmt: skip

    def slots(self, answer: Any) -> list[Bytes]:
        """The server's memory that an answer is about."""
        return [self._memory[slot["offset"] :][: slot["length"]] for slot in answer.context["slots"]]

    def close(self) -> None:
        self._client.close()
        self._context.destroy()


def object_bytes(form: ObjectFormat, item: Item) -> Bytes:
    """`uint8[n]`, the whole object in one."""
    whole = np.concatenate(item.buffers)
    assert len(whole) == form.nbytes(item.object.blocks)
    return whole
