from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from layerstream.errors import TierError
from layerstream.tiers.lmcache.names import ObjectKind, chunk_ids


def test_a_key_is_the_first_ids_of_its_chunk_and_zeros_are_the_rest() -> None:
    key = bytes(range(28)) + b"\xff" * 4
    ids = chunk_ids([key, bytes(32)], 16)
    assert ids[:8] == (0x00010203, 0x04050607, 0x08090A0B, 0x0C0D0E0F, 0x10111213, 0x14151617, 0x18191A1B, 0xFFFFFFFF)
    assert ids[8:] == (0,) * 24


@pytest.mark.parametrize("chunk_tokens", [8, 9, 256])
def test_other_keys_and_other_orders_have_other_ids(chunk_tokens: int) -> None:
    one, two = secrets.token_bytes(32), secrets.token_bytes(32)
    chains = [(), (one,), (two,), (one, two), (two, one), (one, one)]
    ids = {chunk_ids(chain, chunk_tokens) for chain in chains}
    assert len(ids) == len(chains)
    assert {len(each) for each in ids} == {0, chunk_tokens, 2 * chunk_tokens}


def test_chunks_too_short_for_a_key_are_refused_with_what_to_do() -> None:
    with pytest.raises(TierError, match="--chunk-size 8 or more"):
        chunk_ids([bytes(32)], 7)


def test_namespace_rank_and_size_each_have_their_own_name() -> None:
    kind = ObjectKind(namespace=bytes(32), rank=0, nbytes=4096)
    others = [replace(kind, namespace=b"\1" * 32), replace(kind, rank=1), replace(kind, nbytes=8192)]
    names = {each.model for each in (kind, *others)}
    assert len(names) == 4
    assert all(name.startswith("layerstream##v1-") and not set(name) & set("@/\\\0") for name in names)
