"""Six prompts on one prefix, a KV cache that fits half of them, late copies, for 200 rounds: every answer is that of an
engine without the connector."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstream.hooks.vllm.local_engine import LocalEngine
from tests.rigs.late_engine import delay_copies, resident_mib
from tests.rigs.serving_engine import (
    BLOCK,
    TOLERANCE,
    Served,
    ServingEngine,
    difference,
    prompt,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3000)]

ROUNDS = 200
BLOCK_BYTES = 8 * 4 * BLOCK * 2 * 64 * 4
"""Of the tiny model: layers, heads, tokens, K and V, width, float32."""
TOKENS = 6
SEED = 2026
SHARED = prompt(4 * BLOCK, seed=1)
PROMPTS = [SHARED + prompt((2 + index) * BLOCK + 7 * index, seed=2 + index) for index in range(6)]


@pytest.fixture(scope="module")
def without_connector(tiny_llama: Path) -> list[Served]:
    engine = LocalEngine(
        tiny_llama, connector=None, max_model_len=1024, dtype="float32", block_size=BLOCK, skip_tokenizer_init=True
    )
    answers = [engine.serve(ids, tokens=TOKENS, logprobs=5) for ids in PROMPTS]
    engine.close()
    return [
        Served(cached_tokens=0, token_ids=answer.token_ids, logprobs=answer.logprobs, finish_reason="length")
        for answer in answers
    ]


def evicted(core: Any) -> int:
    return int(core.scheduler.connector.scheduler._coordinator._index.evicted)


@pytest.mark.parametrize("load_mode", ["layerwise", "parked"])
def test_every_round_answers_as_without_the_connector(
    tiny_llama: Path,
    without_connector: list[Served],
    load_mode: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    # oneDNN keeps what it compiled for each shape of a step, with any connector or none: 200 MiB in 150 rounds.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "4")
    engine = ServingEngine(
        tiny_llama,
        # The host pool holds 13 chunks, and all prompts together fill more: it evicts, too.
        options={"host_gib": 26.5 * BLOCK_BYTES / (1 << 30), "chunk_tokens": 2 * BLOCK, "load_mode": load_mode},
        num_gpu_blocks_override=33,
        max_num_batched_tokens=256,
    )
    try:
        delay_copies(engine, most_s=0.02, seed=SEED)
        dice = random.Random(SEED)
        processes = engine.processes()
        memory: list[float] = []
        external, worst = 0, 0.0
        for turn in range(ROUNDS):
            order = dice.sample(range(6), 6)
            answers = engine.ask([PROMPTS[index] for index in order], tokens=TOKENS)
            for index, answer in zip(order, answers, strict=True):
                worst = max(worst, difference(answer, without_connector[index]))
                assert worst < TOLERANCE, f"seed {SEED}, round {turn}, prompt {index}"
            external += sum(engine.loaded())
            memory.append(resident_mib(processes))
            if dice.random() < 0.5:
                engine.settled()
                engine.forget()
        record_property("tokens loaded", external)
        record_property("chunks evicted", engine.in_core(evicted))
        record_property("largest difference", worst)
        record_property("MiB every tenth of the way", [round(one, 1) for one in memory[:: ROUNDS // 10]])
        assert external > ROUNDS * BLOCK
        assert engine.in_core(evicted) > ROUNDS
        assert memory[-1] - memory[ROUNDS // 4] < 16, memory[:: ROUNDS // 20]
        assert engine.settled() == engine.idle
    finally:
        engine.close()
