"""MultiConnector on a real engine, with vLLM's ExampleConnector before or after LayerStream: whoever loads, both save,
and neither serves what the other had not loaded yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerstream.hooks.vllm.register import NAME
from tests.rigs.serving_engine import BLOCK, TOLERANCE, ServingEngine, difference, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Pair:
    """An engine with both connectors, and the folder of the other one."""

    def __init__(self, model: Path, folder: Path, *, first: bool) -> None:
        self.first, self.folder = first, folder
        ours = {
            "kv_connector": NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_gib": 0.25, "chunk_tokens": 2 * BLOCK, "log_interval_s": 0},
        }
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        self.engine = ServingEngine(
            model,
            connector="MultiConnector",
            options={"connectors": [ours, other] if first else [other, ours]},
        )

    def other_has(self) -> int:
        """Prompts that the other connector has kept."""
        return len(list(self.folder.iterdir()))

    def ours_loaded(self) -> int:
        """Blocks that LayerStream has loaded so far."""
        return int(self.engine.in_core(loaded_blocks))


def loaded_blocks(core: Any) -> int:
    half = next(each for each in core.scheduler.connector._connectors if hasattr(each, "scheduler")).scheduler
    return int(half._coordinator._stats.hit_tokens // half._block_tokens)


@pytest.fixture(scope="module", params=["first", pytest.param("second", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tiny_llama, tmp_path_factory.mktemp("example"), first=request.param == "first")
    yield pair
    pair.engine.close()


def test_the_first_connector_loads_and_the_answer_is_right(pair: Pair) -> None:
    engine, ids = pair.engine, prompt(6 * BLOCK + 5, seed=1)
    cold = engine.ask([ids])[0]
    engine.settled()
    assert pair.other_has() == 1
    engine.forget()
    before = pair.ours_loaded()
    warm = engine.ask([ids])[0]
    assert engine.loaded() == [6 * BLOCK]
    assert pair.ours_loaded() - before == (6 if pair.first else 0)
    assert difference(warm, cold) < TOLERANCE
    assert engine.settled() == engine.idle


def test_what_the_other_connector_lacks_layerstream_loads(pair: Pair) -> None:
    engine, shared = pair.engine, prompt(4 * BLOCK, seed=2)
    one, two = shared + prompt(50, seed=3), shared + prompt(61, seed=4)
    engine.ask([one])
    wanted = engine.ask([two], cold=True)[0]
    for kept in pair.folder.iterdir():
        shutil.rmtree(kept)
    engine.settled()
    engine.forget()
    engine.loads()
    before = pair.ours_loaded()
    warm = engine.ask([two])[0]
    assert pair.ours_loaded() - before == engine.loaded()[0] // BLOCK >= 4
    assert difference(warm, wanted) < TOLERANCE
    assert engine.settled() == engine.idle


def test_what_the_other_connector_loaded_is_saved_as_it_was(pair: Pair) -> None:
    engine, ids = pair.engine, prompt(6 * BLOCK + 9, seed=5)
    cold = engine.ask([ids])[0]
    engine.settled()
    # LayerStream forgets what it has, the other one does not.
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.forget()
    engine.loads()
    before = pair.ours_loaded()
    assert difference(engine.ask([ids])[0], cold) < TOLERANCE
    assert engine.loaded() == [6 * BLOCK]
    assert pair.ours_loaded() == before
    engine.settled()
    for kept in pair.folder.iterdir():
        shutil.rmtree(kept)
    engine.forget()
    assert difference(engine.ask([ids])[0], cold) < TOLERANCE
    assert pair.ours_loaded() - before == 6
    assert engine.settled() == engine.idle
