"""Looking up a long prefix in a large index."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from layerstream.index import PrefixIndex
from profiles.microbench.results import Results, Row, Target

CHUNKS = 1_000_000
PREFIX_CHUNKS = 1_000
HASH_BYTES = 32
ROUNDS = 200


@pytest.fixture(params=[2, 16], ids=["2 blocks a chunk", "16 blocks a chunk"])
def filled(request: pytest.FixtureRequest) -> Iterator[tuple[PrefixIndex, list[list[bytes]]]]:
    """An index that holds a million chunks, all published, and the prompts it holds: 256 tokens in a chunk, in the
    blocks of a CPU engine (128 tokens) or of a GPU's (16)."""
    blocks = PREFIX_CHUNKS * request.param
    source = random.Random(0)
    index = PrefixIndex(slots=CHUNKS, chunk_blocks=request.param)
    prompts = []
    # Millions of small objects that stay: looking for garbage among them takes longer than making them.
    gc.disable()
    try:
        for _ in range(CHUNKS // PREFIX_CHUNKS):
            noise = source.randbytes(blocks * HASH_BYTES)
            hashes = [noise[at : at + HASH_BYTES] for at in range(0, len(noise), HASH_BYTES)]
            spans = index.reserve(hashes, 0, blocks)
            assert spans is not None
            index.publish(spans)
            prompts.append(hashes)
        assert index.chunks == CHUNKS
        yield index, prompts
    finally:
        gc.enable()


def test_lookup_of_a_long_prefix(
    benchmark: Any, filled: tuple[PrefixIndex, list[list[bytes]]], results: Results
) -> None:
    index, prompts = filled
    source = random.Random(1)

    def another_request() -> tuple[tuple[list[bytes], int], dict[str, Any]]:
        # As from a request of its own: hash objects not seen before, and a prefix no recent lookup has warmed.
        hashes = [bytes(bytearray(block)) for block in source.choice(prompts)]
        return (hashes, len(hashes)), {}

    matched = benchmark.pedantic(index.match, setup=another_request, rounds=ROUNDS, iterations=1)
    assert matched == PREFIX_CHUNKS * index.chunk_blocks
    results.add(
        Row(
            name=f"lookup of 1,000 chunks in 1,000,000, {index.chunk_blocks} blocks each",
            unit="us",
            scale=1e6,
            digits=1,
            target=Target(relation="<", value=200e-6),
            samples=benchmark.stats.stats.data,
            note="PrefixIndex.match of a prefix that is there in full, each time another one",
        )
    )
