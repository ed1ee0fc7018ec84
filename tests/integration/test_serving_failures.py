"""A load that fails on a real engine, with two equal prompts in one batch: never a wrong answer, and the end that
`kv_load_failure_policy` says for whoever was to be given the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.serving_engine import BLOCK, TOLERANCE, Served, ServingEngine, difference, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

IDS = prompt(6 * BLOCK + 5, seed=1)


def fail_second_layer(_: Any) -> None:
    from layerstream.streams import cpu_streams

    attempt, seen = cpu_streams._attempt, []

    def failing(stream: str, work: Any, args: Any, kwargs: Any) -> Any:
        if stream == "layerstream-load" and work is not cpu_streams._pass:
            seen.append(work)
            if len(seen) == 2:
                return cpu_streams._following(OSError("planted"), "planted: layer 1 is not copied")
        return attempt(stream, work, args, kwargs)

    cpu_streams._attempt = failing


def start(model: Path, policy: str, load_mode: str, *, two_steps_in_flight: bool = False) -> ServingEngine:
    return ServingEngine(
        model,
        options={"host_gib": 0.25, "load_mode": load_mode},
        transfer={"kv_load_failure_policy": policy},
        two_steps_in_flight=two_steps_in_flight,
    )


def prepare(engine: ServingEngine) -> Served:
    """Serve the prompt, let the pool be all that has it, and make the next load fail."""
    cold = engine.ask([IDS])[0]
    engine.settled()
    engine.forget()
    warm = engine.ask([IDS])[0]
    assert difference(warm, cold) < TOLERANCE
    assert engine.loaded() == [6 * BLOCK]
    engine.forget()
    engine.in_worker(fail_second_layer)
    return cold


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["one step", "two steps in flight"])
def two_steps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_recompute_answers_both_as_if_nothing_had_been_there(tiny_llama: Path, two_steps: bool) -> None:
    engine = start(tiny_llama, "recompute", "parked", two_steps_in_flight=two_steps)
    try:
        cold = prepare(engine)
        answers = engine.ask([IDS, IDS])
        assert engine.loaded() == [6 * BLOCK]
        assert [difference(answer, cold) < TOLERANCE for answer in answers] == [True, True]
        assert engine.settled() == engine.idle
        # Nothing is loaded any more, and all is served.
        engine.forget()
        assert difference(engine.ask([IDS])[0], cold) < TOLERANCE
        assert engine.loads() == []
    finally:
        engine.close()


@pytest.mark.slow
def test_fail_ends_the_one_that_was_given_the_blocks(tiny_llama: Path, two_steps: bool) -> None:
    engine = start(tiny_llama, "fail", "parked", two_steps_in_flight=two_steps)
    try:
        cold = prepare(engine)
        failed, other = engine.ask([IDS, IDS])
        assert failed.finish_reason == "error"
        assert failed.token_ids == ()
        assert difference(other, cold) < TOLERANCE
        assert engine.settled() == engine.idle
        assert difference(engine.ask([IDS], cold=True)[0], cold) < TOLERANCE
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_amid_a_layerwise_load_nothing_is_right_but_to_stop(tiny_llama: Path, policy: str) -> None:
    engine = start(tiny_llama, policy, "layerwise")
    try:
        prepare(engine)
        with pytest.raises(Exception, match="EngineCore"):
            engine.ask([IDS, IDS])
    finally:
        engine.close()
