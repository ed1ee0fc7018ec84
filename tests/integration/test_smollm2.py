"""A real language model on vLLM's CPU engine: what LayerStream brings back is what vLLM itself would have used.

One engine serves every test of this file; `verify` compares every block in the engine's worker (source == stored ==
restored), and a difference ends the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerstream.hooks.vllm.local_engine import Answer
from tests.rigs.vllm_engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 128
CHUNK_BLOCKS = 4
"""A close look at hits that end inside a chunk needs chunks of several blocks."""
STEP_TOKENS = 1024
"""Prompts longer than this are prefilled in several steps."""


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        smollm2,
        options={"host_gib": 1, "chunk_tokens": CHUNK_BLOCKS * BLOCK, "verify": True},
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=4,
    )
    yield engine
    engine.close()


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids without a pattern that a small model could repeat."""
    return random.Random(seed).sample(range(200, 45_000), tokens)


def serve(engine: VllmEngine, ids: list[int], *, tokens: int = 4) -> Answer:
    return engine.serve(ids, tokens=tokens, logprobs=5)


def compared(worker: Any) -> dict[str, int]:
    return {kind.name: count for kind, count in worker.engine.verifier.compared.items()}


def difference(one: Answer, other: Answer) -> float:
    """Largest difference of the first token's log probabilities among the tokens that both answers name."""
    mine, theirs = one.logprobs[0], other.logprobs[0]
    shared = mine.keys() & theirs.keys()
    return max(abs(mine[token] - theirs[token]) for token in shared) if shared else float("inf")


def expected_hit(tokens: int) -> int:
    """Whole blocks, never the block of the last prompt token."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        (3 * BLOCK + 57, "ends inside a chunk"),
        (2 * CHUNK_BLOCKS * BLOCK + 1, "exactly two chunks and one token"),
        (5 * BLOCK, "exactly five blocks"),
        (5 * BLOCK + 1, "five blocks and one token"),
        (2600, "prefilled in three steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_hit_equals_vllms_own_hit_bit_for_bit(engine: VllmEngine, tokens: int, what: str) -> None:
    ids = prompt(tokens, seed=tokens)
    before = engine.in_worker(compared)
    cold = serve(engine, ids)
    assert cold.cached_tokens == 0
    local = serve(engine, ids)
    assert local.cached_tokens == expected_hit(tokens)
    engine.forget()
    warm = serve(engine, ids)
    assert warm.cached_tokens == expected_hit(tokens), what
    assert warm.logprobs == local.logprobs
    assert warm.token_ids == local.token_ids
    # The prompt was computed in other pieces, so the first token's distribution is close to the cold run's, not equal.
    assert difference(warm, cold) < 0.25
    after = engine.in_worker(compared)
    assert after["SAVE"] - before["SAVE"] == (tokens + 3) // BLOCK
    assert after["LOAD"] - before["LOAD"] == expected_hit(tokens) // BLOCK


def test_a_shared_prefix_is_loaded_and_a_new_suffix_computed(engine: VllmEngine) -> None:
    shared, suffix, other = prompt(7 * BLOCK + 30, seed=1), prompt(200, seed=2), prompt(260, seed=3)
    engine.forget(connector=True)
    engine.serve(shared + suffix)
    local = serve(engine, shared + other)
    assert local.cached_tokens == 7 * BLOCK
    engine.forget(connector=True)
    engine.serve(shared + suffix)
    engine.forget()
    warm = serve(engine, shared + other)
    assert warm.cached_tokens == 7 * BLOCK
    assert warm.logprobs == local.logprobs


def test_two_requests_of_one_step_share_a_loaded_prefix(engine: VllmEngine) -> None:
    shared = prompt(3 * BLOCK, seed=11)
    one, two = shared + prompt(40, seed=12), shared + prompt(70, seed=13)
    engine.forget(connector=True)
    engine.serve(one)
    engine.serve(two)
    local = engine.serve_together([one, two], tokens=4, logprobs=5)
    assert [answer.cached_tokens for answer in local] == [3 * BLOCK, 3 * BLOCK]
    engine.forget()
    before = engine.in_worker(compared)
    warm = engine.serve_together([one, two], tokens=4, logprobs=5)
    assert [answer.cached_tokens for answer in warm] == [3 * BLOCK, 3 * BLOCK]
    assert [answer.logprobs for answer in warm] == [answer.logprobs for answer in local]
    # The second request finds the first one's blocks in vLLM's own cache while they are being loaded.
    assert engine.in_worker(compared)["LOAD"] - before["LOAD"] == 3


def test_blocks_filled_by_decoding_come_back(engine: VllmEngine) -> None:
    ids = prompt(2 * BLOCK - 20, seed=21)
    answer = serve(engine, ids, tokens=60)
    longer = ids + list(answer.token_ids)
    local = serve(engine, longer)
    assert local.cached_tokens == 2 * BLOCK
    engine.forget()
    warm = serve(engine, longer)
    assert warm.cached_tokens == 2 * BLOCK
    assert warm.logprobs == local.logprobs


def test_an_aborted_request_leaves_the_engine_right(engine: VllmEngine) -> None:
    ids = prompt(6 * BLOCK + 5, seed=31)
    engine.serve(ids)
    local = serve(engine, ids)
    engine.forget()
    llm_engine = engine.llm.llm_engine
    params = engine._params(max_tokens=200, temperature=0.0, detokenize=False, ignore_eos=True)
    llm_engine.add_request("to-abort", {"prompt_token_ids": ids}, params)
    llm_engine.step()
    llm_engine.abort_request(["to-abort"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    engine.forget()
    warm = serve(engine, ids)
    assert warm.cached_tokens == expected_hit(len(ids))
    assert warm.logprobs == local.logprobs


def test_a_reset_with_the_connector_forgets_everything(engine: VllmEngine) -> None:
    ids = prompt(4 * BLOCK + 9, seed=41)
    engine.serve(ids)
    engine.forget()
    assert serve(engine, ids).cached_tokens == 4 * BLOCK
    engine.forget(connector=True)
    assert serve(engine, ids).cached_tokens == 0


def flip_pool(worker: Any) -> None:
    """Flip a high bit in every byte pair of the pool, on every layer."""
    pool = worker.engine.pool
    for layer in range(len(worker.engine.geometry.layers)):
        for first, count in pool.split(0, pool.pages):
            pool.span(layer, first, count)[1::2] ^= 0x40


def set_verifier(worker: Any, on: bool) -> None:
    engine = worker.engine
    if on:
        engine.verifier = engine.kept_verifier
    else:
        engine.kept_verifier, engine.verifier = engine.verifier, None


def test_damaged_bytes_would_be_seen(engine: VllmEngine) -> None:
    """Negative control, last because it ends the engine: both checks above can fail."""
    ids = prompt(5 * BLOCK + 77, seed=51)
    engine.serve(ids)
    local = serve(engine, ids)
    engine.forget()
    engine.in_worker(flip_pool)
    engine.in_worker(set_verifier, False)
    damaged = serve(engine, ids)
    assert damaged.cached_tokens == local.cached_tokens
    assert damaged.logprobs != local.logprobs
    assert difference(damaged, local) > 0.25
    engine.in_worker(set_verifier, True)
    engine.forget()
    with pytest.raises(Exception, match="EngineCore"):
        engine.serve(ids)
