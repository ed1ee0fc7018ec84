"""A tiny random model: a pool and a KV cache too small for the traffic, an engine started again, parked loads.

Greedy tokens of a random model say little, so logprobs are compared, and every warm run says how many tokens it hit.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerstream.hooks.vllm.local_engine import Answer
from tests.rigs.vllm_engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 128


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=tokens)


def serve(engine: VllmEngine, ids: list[int], *, tokens: int = 4) -> Answer:
    return engine.serve(ids, tokens=tokens, logprobs=5)


def compared(worker: Any) -> dict[str, int]:
    return {kind.name: count for kind, count in worker.engine.verifier.compared.items()}


@pytest.fixture(scope="module")
def small_engine(tiny_llama: Path) -> Iterator[VllmEngine]:
    """20 blocks of KV cache, a pool of 6 chunks of 2 blocks, and the transfer path of a GPU engine."""
    engine = VllmEngine(
        tiny_llama,
        options={"host_gib": 26 * (1 << 20) / (1 << 30), "verify": True, "sanitize": True, "transfer_path": "staged"},
        num_gpu_blocks_override=20,
        max_num_batched_tokens=512,
        max_num_seqs=6,
        max_model_len=2048,
    )
    yield engine
    engine.close()


def test_traffic_that_overflows_pool_and_cache_stays_right(small_engine: VllmEngine) -> None:
    """Six requests of which three fit: some are preempted and resumed, chunks are evicted, saves are dropped."""
    engine = small_engine
    shared = prompt(2 * BLOCK, seed=1)
    prompts = [shared + prompt(BLOCK * (index + 1) + 17, seed=2 + index) for index in range(6)]
    alone = []
    for ids in prompts:
        engine.forget(connector=True)
        alone.append(serve(engine, ids, tokens=40))
    dice = random.Random(0)
    hits = 0
    for _ in range(4):
        order = dice.sample(range(6), 6)
        answers = engine.serve_together([prompts[index] for index in order], tokens=40, logprobs=5)
        for index, answer in zip(order, answers, strict=True):
            hits += answer.cached_tokens
            assert answer.token_ids == alone[index].token_ids
        engine.forget()
    assert hits > 0
    assert engine.in_worker(compared)["LOAD"] > 0


def test_an_idle_engine_finishes_its_saves(small_engine: VllmEngine) -> None:
    engine = small_engine
    engine.forget(connector=True)
    ids = prompt(3 * BLOCK + 5, seed=20)
    serve(engine, ids, tokens=1)
    time.sleep(3)
    engine.forget()
    assert serve(engine, ids, tokens=1).cached_tokens == 3 * BLOCK


@pytest.fixture(scope="module")
def restarted_engine(tiny_llama: Path, small_engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine started again, after one that had saved; loads are parked."""
    serve(small_engine, prompt(3 * BLOCK + 5, seed=20))
    small_engine.close()
    engine = VllmEngine(tiny_llama, options={"host_gib": 0.25, "verify": True, "sanitize": True, "load_mode": "parked"})
    yield engine
    engine.close()


def test_nothing_outlives_the_engine(restarted_engine: VllmEngine) -> None:
    assert serve(restarted_engine, prompt(3 * BLOCK + 5, seed=20)).cached_tokens == 0


@pytest.mark.parametrize("tokens", [BLOCK + 1, 5 * BLOCK, 9 * BLOCK + 40])
def test_a_parked_load_equals_vllms_own_hit(restarted_engine: VllmEngine, tokens: int) -> None:
    engine = restarted_engine
    ids = prompt(tokens, seed=tokens)
    serve(engine, ids)
    local = serve(engine, ids)
    before = engine.in_worker(compared)
    engine.forget()
    warm = serve(engine, ids)
    assert warm.cached_tokens == local.cached_tokens == (tokens - 1) // BLOCK * BLOCK
    assert warm.logprobs == local.logprobs
    after = engine.in_worker(compared)
    assert after["PARKED_LOAD"] - before["PARKED_LOAD"] == warm.cached_tokens // BLOCK
    assert after["LOAD"] == before["LOAD"] == 0


def test_parked_requests_on_one_prefix_load_it_once(restarted_engine: VllmEngine) -> None:
    engine = restarted_engine
    ids = prompt(6 * BLOCK + 3, seed=40)
    serve(engine, ids)
    engine.forget()
    before = engine.in_worker(compared)
    answers = engine.serve_together([ids, ids, ids], tokens=4, logprobs=5)
    assert [answer.cached_tokens for answer in answers] == [6 * BLOCK] * 3
    assert engine.in_worker(compared)["PARKED_LOAD"] - before["PARKED_LOAD"] == 6


START_WITH_A_WRONG_OPTION = """
import sys
from pathlib import Path
from layerstream.hooks.vllm.local_engine import LocalEngine
if __name__ == "__main__":
    LocalEngine(Path(sys.argv[1]), max_model_len=512, options={"host_gb": 4, "chunk_tokens": "many"},
                skip_tokenizer_init=True)
"""


def test_a_wrong_option_stops_the_start_with_one_clear_message(tiny_llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START_WITH_A_WRONG_OPTION)
    ended = subprocess.run(
        [sys.executable, str(script), str(tiny_llama)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "LayerStream: kv_connector_extra_config" in said
    assert "host_gb" in said
    assert "host_gib" in said
    assert "chunk_tokens" in said
    assert "'many'" in said
