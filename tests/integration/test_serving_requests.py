"""Every kind of request on one real engine: chunked prefill, samples, salts, adapters, embeddings.

A tiny random model, float32. Each warm run says how many tokens vLLM took from the connector, and its logprobs are
those of vLLM's own hit of that length, to the last bit, or those of a cold run within what shapes of steps change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.lora_adapters import write_adapter
from tests.rigs.serving_engine import (
    BLOCK,
    TOLERANCE,
    Served,
    ServingEngine,
    difference,
    prompt,
    served,
    whole_blocks,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("nothing_is_left")]

STEP_TOKENS = 2 * BLOCK


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[ServingEngine]:
    engine = ServingEngine(
        tiny_llama,
        options={
            "host_gib": 0.5,
            "chunk_tokens": 2 * BLOCK,
            "transfer_path": "staged",
            # Room for every layer of a prompt while its copies to the host are held.
            "staging_mib": 1024,
            "sanitize": True,
        },
        max_num_batched_tokens=STEP_TOKENS,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        enable_prompt_embeds=True,
    )
    yield engine
    engine.close()


def warm_equals_local(engine: ServingEngine, ask: Any) -> list[Served]:
    """Serve cold, from vLLM's own cache, and from the pool: the last two must agree in every bit, and load once."""
    engine.loads()
    cold = ask()
    assert all(one.cached_tokens == 0 for one in cold)
    local = ask()
    assert engine.loads() == []
    engine.settled()
    engine.forget()
    warm: list[Served] = ask()
    assert [one.cached_tokens for one in warm] == [one.cached_tokens for one in local]
    assert [one.logprobs for one in warm] == [one.logprobs for one in local]
    assert max(difference(one, other) for one, other in zip(warm, cold, strict=True)) < TOLERANCE
    return warm


def slots(core: Any) -> list[int]:
    return [chunk.slot for chunk in core.scheduler.connector.scheduler._coordinator._index._heads.values()]


def clear_page(worker: Any, layer: int, page: int) -> None:
    worker.engine.pool.span(layer, page, 1).zero_()


@pytest.mark.parametrize("layer", [0, 7])
def test_one_wrong_block_of_one_layer_would_be_seen(engine: ServingEngine, layer: int) -> None:
    ids = prompt(6 * BLOCK + 5, seed=10 + layer)
    cold = engine.ask([ids])
    engine.settled()
    engine.forget()
    found = engine.in_core(slots)
    assert len(found) == 3
    engine.in_worker(clear_page, layer, 2 * found[1])
    damaged = engine.ask([ids])
    assert engine.loaded() == [6 * BLOCK]
    assert difference(damaged[0], cold[0]) > 10 * TOLERANCE


@pytest.mark.parametrize("tokens", [4 * BLOCK, 4 * BLOCK + 1, 20 * BLOCK + 5])
def test_a_prompt_that_was_prefilled_in_chunks_comes_back_whole(engine: ServingEngine, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    warm = warm_equals_local(engine, lambda: engine.ask([ids]))
    assert warm[0].cached_tokens == whole_blocks(tokens)
    assert engine.loaded() == [whole_blocks(tokens)]


def test_new_warm_decoding_and_chunked_requests_share_steps(engine: ServingEngine) -> None:
    warm = [prompt(5 * BLOCK + 9 + index, seed=300 + index) for index in range(6)]
    cold = [prompt(7 * BLOCK + 3 * index, seed=310 + index) for index in range(6)]
    wanted = engine.ask([*warm, *cold], tokens=12, cold=True)
    engine.forget(connector=True)
    engine.ask(warm)
    engine.settled()
    engine.forget()
    dice, answers = random.Random(0), dict[str, Served]()
    llm = engine.llm.llm_engine
    queue = [(f"mixed-{index}", ids) for index, ids in enumerate([*warm, *cold])]
    dice.shuffle(queue)
    while queue or llm.has_unfinished_requests():
        for name, ids in queue[:2]:
            llm.add_request(name, {"prompt_token_ids": ids}, engine.sampling(tokens=12))
        del queue[:2]
        for output in llm.step():
            if output.finished:
                answers[output.request_id] = served(output)[0]
    assert sorted(engine.loaded()) == [5 * BLOCK] * 6
    for index, one in enumerate(wanted):
        assert difference(answers[f"mixed-{index}"], one) < TOLERANCE


def test_samples_of_one_prompt_load_it_once(engine: ServingEngine) -> None:
    ids = prompt(6 * BLOCK + 7, seed=20)
    # Samples of the likeliest token: on a CPU, vLLM cannot seed requests whose prompt takes several steps.
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "top_k": 1}
    cold = engine.ask([ids], tokens=12, cold=True, **sampled)
    assert len(cold) == 3
    engine.settled()
    engine.forget()
    engine.loads()
    warm = engine.ask([ids], tokens=12, **sampled)
    assert engine.loaded() == [6 * BLOCK]
    assert {one.cached_tokens for one in warm} == {6 * BLOCK}
    assert max(difference(one, other) for one, other in zip(warm, cold, strict=True)) < TOLERANCE


def test_a_salt_shares_with_itself_alone(engine: ServingEngine) -> None:
    ids = prompt(6 * BLOCK + 11, seed=30)
    for salt in ("one", "two", None):
        asked = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
        warm = warm_equals_local(engine, lambda asked=asked: engine.ask([asked]))
        assert engine.loaded() == [6 * BLOCK]
        assert warm[0].cached_tokens == 6 * BLOCK


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / name, seed=seed) for seed, name in enumerate(("red", "blue"))]


def test_an_adapter_shares_with_itself_alone(engine: ServingEngine, adapters: list[Path]) -> None:
    from vllm.lora.request import LoRARequest

    ids = prompt(6 * BLOCK + 13, seed=40)
    plain = warm_equals_local(engine, lambda: engine.ask([ids]))
    answers = [plain[0]]
    for number, folder in enumerate(adapters, start=1):
        lora = LoRARequest(folder.name, number, str(folder))
        answers += warm_equals_local(engine, lambda lora=lora: engine.ask([ids], lora=lora))
        assert engine.loaded() == [6 * BLOCK]
    # A salt that is called as an adapter is.
    engine.loads()
    salted = {"prompt_token_ids": ids, "cache_salt": adapters[0].name}
    assert difference(engine.ask([salted])[0], plain[0]) < TOLERANCE
    assert engine.loads() == []
    for index, one in enumerate(answers):
        assert all(difference(one, other) > 100 * TOLERANCE for other in answers[:index])


def test_an_adapter_that_changed_in_place_shares_nothing_with_what_it_was(
    engine: ServingEngine, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    ids = prompt(5 * BLOCK + 3, seed=50)
    folder = write_adapter(tmp_path / "green", seed=5)
    before = warm_equals_local(engine, lambda: engine.ask([ids], lora=LoRARequest("green", 3, str(folder))))
    write_adapter(folder, seed=6)
    engine.forget()  # vLLM's own cache knows an adapter by its name
    engine.loads()
    changed = LoRARequest("green", 3, str(folder), load_inplace=True)
    after = engine.ask([ids], lora=changed)
    assert engine.loads() == []
    assert difference(after[0], before[0]) > 100 * TOLERANCE
    assert difference(after[0], engine.ask([ids], lora=changed, cold=True)[0]) < TOLERANCE


def test_embedded_prompts_share_with_equal_ones_alone(engine: ServingEngine) -> None:
    dice = torch.Generator().manual_seed(3)
    one = torch.randn(5 * BLOCK + 9, 256, generator=dice) * 0.05
    other = one.clone()
    other[0, 0] += 1.0
    warm = warm_equals_local(engine, lambda: engine.ask([{"prompt_embeds": one}]))
    assert warm[0].cached_tokens == 5 * BLOCK
    assert engine.loaded() == [5 * BLOCK]
    engine.forget()
    different = engine.ask([{"prompt_embeds": other}])
    assert engine.loads() == []
    assert difference(different[0], warm[0]) > TOLERANCE
