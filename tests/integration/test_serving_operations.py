"""What an operator does to a real engine: lets it draft tokens (speculative decoding), leaves it alone, pauses it, puts
it to sleep, gives it other weights, shuts it down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.late_engine import Gate
from tests.rigs.serving_engine import BLOCK, TOLERANCE, ServingEngine, difference, prompt, whole_blocks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_is_left")]

DRAFT = 3


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[ServingEngine]:
    engine = ServingEngine(
        tiny_llama,
        options={
            "host_gib": 0.25,
            "chunk_tokens": 2 * BLOCK,
            "transfer_path": "staged",
            # Room for every layer of a prompt while its copies to the host are held.
            "staging_mib": 1024,
            "sanitize": True,
        },
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFT,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        max_num_batched_tokens=256,
    )
    yield engine
    engine.close()


def drafted(engine: ServingEngine) -> tuple[int, int]:
    """Draft tokens so far, and those of them that were right."""
    counts = {each.name: each.value for each in engine.llm.get_metrics() if hasattr(each, "value")}
    return (
        int(counts["vllm:spec_decode_num_draft_tokens"]),
        int(counts["vllm:spec_decode_num_accepted_tokens"]),
    )


@pytest.mark.parametrize("remainder", [1, 1 + DRAFT, 17])
def test_what_drafts_filled_comes_back_as_the_model_chose_it(engine: ServingEngine, remainder: int) -> None:
    ids = prompt(20, seed=remainder) * 12
    ids = ids[: 5 * BLOCK + remainder]
    before = drafted(engine)
    answer = engine.ask([ids], tokens=100)[0]
    now = drafted(engine)
    assert 0 < now[1] - before[1] < now[0] - before[0], "drafts must have been right and wrong"
    longer = [*ids, *answer.token_ids]
    engine.settled()
    for asked in (ids, longer):
        engine.forget()
        engine.loads()
        warm = engine.ask([asked], tokens=20)[0]
        # The answer's last token was never an input, so its block was full only if another token follows it.
        assert engine.loaded() == [whole_blocks(len(asked))]
        engine.settled()
    # Only here, as it saves every block of its prompt too.
    assert difference(warm, engine.ask([longer], tokens=20, cold=True)[0]) < TOLERANCE


def test_what_was_saved_outlives_a_pause(engine: ServingEngine) -> None:
    ids = prompt(6 * BLOCK + 1, seed=60)
    cold = engine.ask([ids])
    engine.settled()
    engine.forget()
    engine.llm.sleep(level=0)
    assert engine.llm.wake_up()
    warm = engine.ask([ids])
    assert difference(warm[0], cold[0]) < TOLERANCE
    assert engine.loaded() == [6 * BLOCK]


def test_sleep_waits_for_a_save_and_leaves_nothing_to_hit(engine: ServingEngine, tmp_path: Path) -> None:
    """vLLM resets the connector with its own cache: the KV cache is gone, and the weights may be others."""
    ids = prompt(6 * BLOCK + 1, seed=61)
    with Gate(engine, tmp_path / "gate", "layerstream-save-copy") as gate:
        cold = engine.ask([ids])
        gate.await_copy()
        opening = threading.Timer(0.5, gate.open)
        opening.start()
        engine.llm.sleep(level=1)
        opening.join()
    assert engine.books() == engine.idle
    assert engine.llm.wake_up()
    again = engine.ask([ids])
    assert engine.loads() == []
    assert difference(again[0], cold[0]) < TOLERANCE


def test_this_build_refuses_to_put_memory_away(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        ServingEngine(tiny_llama, enable_sleep_mode=True)


def test_an_idle_engine_finishes_its_last_save_by_itself(engine: ServingEngine, tmp_path: Path) -> None:
    ids = prompt(7 * BLOCK + 5, seed=80)
    with Gate(engine, tmp_path / "gate", "layerstream-save-copy") as gate:
        engine.ask([ids])
        gate.await_copy()
        assert engine.books()["due"] > 0
        gate.open()
        time.sleep(3)  # and ask nothing
        assert engine.books() == engine.idle
    engine.forget()
    engine.ask([ids])
    assert engine.loaded() == [7 * BLOCK]


def scale_first_norm(model: Any, factor: float) -> None:
    model.model.layers[0].input_layernorm.weight.data.mul_(factor)


def test_after_new_weights_and_a_reset_nothing_old_is_used(engine: ServingEngine, tmp_path: Path) -> None:
    ids, saving = prompt(6 * BLOCK + 15, seed=70), prompt(5 * BLOCK + 2, seed=71)
    old = engine.ask([ids])
    engine.settled()
    engine.loads()
    with Gate(engine, tmp_path / "gate", "layerstream-save-copy") as gate:
        engine.ask([saving])
        gate.await_copy()
        assert engine.books()["due"] > 0
        engine.in_model(scale_first_norm, 4.0)
        engine.llm.reset_prefix_cache(reset_connector=True)
        gate.open()
        engine.settled()
    try:
        new = engine.ask([ids, saving])
        assert engine.loads() == []
        assert difference(new[0], old[0]) > 100 * TOLERANCE
        wanted = engine.ask([ids, saving], cold=True)
        engine.settled()
        engine.forget()
        again = engine.ask([ids, saving])
        assert sorted(engine.loaded()) == [5 * BLOCK, 6 * BLOCK]
        for index in range(2):
            assert difference(again[index], wanted[index]) < TOLERANCE
    finally:
        engine.in_model(scale_first_norm, 0.25)


def test_an_engine_that_is_shut_down_amid_a_save_ends_with_it(engine: ServingEngine, tmp_path: Path) -> None:
    core = engine.llm.llm_engine.engine_core.resources.engine_manager.processes[0]
    worker = Path(f"/proc/{engine.processes()[1]}/stat")
    with Gate(engine, tmp_path / "gate", "layerstream-save-copy") as gate:
        engine.ask([prompt(6 * BLOCK, seed=90)], tokens=1)
        gate.await_copy()
        assert engine.books()["due"] > 0
        threading.Timer(2.0, gate.open).start()
        engine.close()
    assert core.exitcode == 0, "vLLM had to kill it"
    deadline = time.monotonic() + 30
    while worker.exists() and worker.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, worker.read_text()
        time.sleep(0.05)
