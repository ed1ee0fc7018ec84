"""A compiled model: vLLM runs it before any request, when no step has told the hooks anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.serving_engine import BLOCK, TOLERANCE, ServingEngine, difference, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_requests_after_a_warm_up_are_right(tiny_llama: Path) -> None:
    engine = ServingEngine(
        tiny_llama,
        options={"host_gib": 0.25, "chunk_tokens": 2 * BLOCK, "verify": True, "sanitize": True},
        enforce_eager=False,
        max_num_batched_tokens=128,
    )
    try:
        assert engine.idle == engine.books()
        ids = prompt(6 * BLOCK + 5, seed=1)
        first = engine.ask([ids])[0]
        engine.settled()
        engine.forget()
        warm = engine.ask([ids])[0]
        assert engine.loaded() == [6 * BLOCK]
        cold = engine.ask([ids], cold=True)[0]
        assert difference(first, cold) < TOLERANCE
        assert difference(warm, cold) < TOLERANCE
        assert engine.settled() == engine.idle
    finally:
        engine.close()
