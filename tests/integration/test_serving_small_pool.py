"""Real engines whose KV cache is too small for the traffic: preempted, resumed, aborted and overtaken requests.

One computes everything it does not load (no prefix caching, layerwise loads, steps one by one), the other has prefix
caching, parked loads and two steps in flight.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.late_engine import Gate, delay_copies
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

BLOCKS = 33
"""One of them is vLLM's own."""
KINDS: dict[str, dict[str, Any]] = {
    "layerwise": {
        "options": {"chunk_tokens": BLOCK // 2, "verify": True},
        "enable_prefix_caching": False,
    },
    "parked": {
        "options": {"chunk_tokens": 2 * BLOCK, "load_mode": "parked", "transfer_path": "staged"},
        "two_steps_in_flight": True,
    },
}
LOADS = ["layerstream-load", "layerstream-load-copy"]


@pytest.fixture(scope="module", params=["layerwise", pytest.param("parked", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[ServingEngine]:
    kind = KINDS[request.param]
    engine = ServingEngine(
        tiny_llama,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=256,
        scheduling_policy="priority",
        **{**kind, "options": {"host_gib": 0.25, "sanitize": True, **kind["options"]}},
    )
    yield engine
    engine.close()


def alone(engine: ServingEngine, prompts: Sequence[Sequence[int]], *, tokens: Sequence[int]) -> list[Served]:
    """Each prompt computed by itself, and nothing kept."""
    answers = [engine.ask([ids], tokens=count, cold=True)[0] for ids, count in zip(prompts, tokens, strict=True)]
    engine.settled()
    engine.forget(connector=True)
    return answers


def check(answers: Sequence[Served], wanted: Sequence[Served]) -> None:
    for answer, one in zip(answers, wanted, strict=True):
        assert difference(answer, one) < TOLERANCE


def test_a_preempted_request_resumes_with_its_prompt_and_what_it_had_generated(engine: ServingEngine) -> None:
    prompts = [prompt(11 * BLOCK + 20, seed=seed) for seed in (1, 2)]
    # The longer it lives alone, the less of the other one does vLLM's own cache keep.
    tokens = [10 * BLOCK, 5 * BLOCK]
    wanted = alone(engine, prompts, tokens=tokens)
    engine.preemptions()
    check(engine.ask(prompts, tokens=tokens), wanted)
    assert engine.preemptions() == 1
    (load,) = engine.loads()
    assert load.asked == len(prompts[1])
    assert whole_blocks(load.asked) < load.until <= whole_blocks(load.known)


def test_the_least_urgent_request_is_preempted_for_one_that_overtakes(engine: ServingEngine) -> None:
    prompts = [prompt(9 * BLOCK + 5 * index, seed=10 + index) for index in range(4)]
    wanted = alone(engine, prompts, tokens=[3 * BLOCK] * 4)
    engine.preemptions()
    for turn in range(2):
        check(engine.ask(prompts, tokens=3 * BLOCK, priority=[3, 2, 1, 0]), wanted)
        assert engine.preemptions() > 0, f"turn {turn}"
        engine.settled()
        engine.forget()
    loads = engine.loads()
    assert len(loads) >= 4
    assert all(load.until <= whole_blocks(load.known) for load in loads)


def test_six_prompts_on_one_prefix_of_which_half_fit_stay_right(engine: ServingEngine) -> None:
    shared = prompt(4 * BLOCK, seed=20)
    prompts = [shared + prompt((2 + index) * BLOCK + 7 * index, seed=21 + index) for index in range(6)]
    wanted = alone(engine, prompts, tokens=[6] * 6)
    seed = 4
    delay_copies(engine, most_s=0.02, seed=seed)
    try:
        dice = random.Random(seed)
        for turn in range(20):
            order = dice.sample(range(6), 6)
            answers = engine.ask([prompts[index] for index in order], tokens=6)
            for index, answer in zip(order, answers, strict=True):
                assert difference(answer, wanted[index]) < TOLERANCE, f"turn {turn}, prompt {index}"
    finally:
        delay_copies(engine, most_s=0.0, seed=0)
    assert sum(engine.loaded()) > 20 * BLOCK


def start(engine: ServingEngine, name: str, ids: list[int], *, tokens: int) -> None:
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, engine.sampling(tokens=tokens))


def finish(engine: ServingEngine) -> dict[str, Served]:
    answers: dict[str, Served] = {}
    llm = engine.llm.llm_engine
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                answers[output.request_id] = served(output)[0]
    return answers


def test_an_abort_amid_a_load_leaves_what_others_load_right(engine: ServingEngine, tmp_path: Path) -> None:
    prompts = [prompt(6 * BLOCK + 5, seed=30), prompt(5 * BLOCK + 21, seed=31), prompt(4 * BLOCK + 9, seed=32)]
    wanted = alone(engine, prompts, tokens=[8] * 3)
    engine.ask(prompts)
    engine.settled()
    engine.forget()
    engine.loads()
    with Gate(engine, tmp_path / "gate", *LOADS) as gate:
        start(engine, "aborted", prompts[0], tokens=8)
        gate.await_copy()
        engine.llm.llm_engine.abort_request(["aborted"])
        # The blocks of the one that is gone must not be handed to these while its load still writes them.
        start(engine, "same", prompts[0], tokens=8)
        start(engine, "other", prompts[1], tokens=8)
        time.sleep(0.3)
        gate.open()
        answers = finish(engine)
    check([answers["same"], answers["other"]], wanted[:2])
    assert sorted(engine.loaded()) == [5 * BLOCK, 6 * BLOCK, 6 * BLOCK]
    check(engine.ask([prompts[2]], tokens=8), wanted[2:])
    assert engine.loaded() == [4 * BLOCK]


def test_aborts_at_any_time_leak_nothing(engine: ServingEngine) -> None:
    prompts = [prompt((5 + index) * BLOCK + 3, seed=40 + index) for index in range(5)]
    wanted = alone(engine, prompts, tokens=[20] * 5)
    dice = random.Random(5)
    delay_copies(engine, most_s=0.01, seed=5)
    try:
        for turn in range(6):
            for index, ids in enumerate(prompts):
                start(engine, f"{turn}-{index}", ids, tokens=20)
            time.sleep(dice.uniform(0, 0.4))
            gone = dice.sample(range(5), 3)
            engine.llm.llm_engine.abort_request([f"{turn}-{index}" for index in gone])
            answers = finish(engine)
            for index in set(range(5)) - set(gone):
                assert difference(answers[f"{turn}-{index}"], wanted[index]) < TOLERANCE
    finally:
        delay_copies(engine, most_s=0.0, seed=0)
    assert engine.settled() == engine.idle
    engine.forget()
    engine.loads()
    check(engine.ask(prompts, tokens=20), wanted)
    assert engine.loads()
