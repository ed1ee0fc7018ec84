"""Parked requests released early on a real engine whose copies are slow, alone and beside a decode: right logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.serving_engine import BLOCK, TOLERANCE, ServingEngine, difference, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS = 8
SLOW_S = 0.08
"""For each layer of a load: a step takes a few milliseconds."""
IDS = prompt(6 * BLOCK + 5, seed=1)
LONGER = [*IDS, *prompt(BLOCK, seed=2)]
OTHER = prompt(2 * BLOCK, seed=3)


def release_after(core: Any, layer: int) -> None:
    import dataclasses

    from layerstream.decisions import FixedMode, LoadMode

    coordinator = core.scheduler.connector.scheduler._coordinator
    core.released, release = [], coordinator._flights.release

    class Early:
        def choose(self, case: Any) -> Any:
            return dataclasses.replace(FixedMode(LoadMode.PARKED).choose(case), release_after_layer=layer)

    def count(report: Any) -> Any:
        flights = release(report)
        core.released += [flight.job.job_id for flight in flights]
        return flights

    coordinator._chooser, coordinator._flights.release = Early(), count


def take_released(core: Any) -> int:
    count = len(core.released)
    core.released.clear()
    return count


def stall_seconds(core: Any) -> float:
    return float(core.scheduler.connector.scheduler._moved.stall_seconds)


def slow_loads(_: Any, seconds: float) -> None:
    import time

    from layerstream.streams import cpu_streams

    attempt = cpu_streams._attempt

    def slow(stream: str, work: Any, args: Any, kwargs: Any) -> Any:
        if stream == "layerstream-load" and work is not cpu_streams._pass:
            time.sleep(seconds)
        return attempt(stream, work, args, kwargs)

    cpu_streams._attempt = slow


def leave_gates_out(core: Any) -> None:
    flights = type(core.scheduler.connector.scheduler._coordinator._flights)
    flights.released = property(lambda _: ())


@pytest.fixture(scope="module", params=[False, True], ids=["one step", "two steps in flight"])
def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[ServingEngine]:
    engine = ServingEngine(
        tiny_llama, options={"host_gib": 0.25, "layers_per_gate": 1}, two_steps_in_flight=request.param
    )
    engine.in_core(release_after, 2)
    engine.in_worker(slow_loads, SLOW_S)
    yield engine
    engine.close()


def test_alone_it_equals_vllms_own_hit_in_every_bit(engine: ServingEngine) -> None:
    engine.ask([IDS], tokens=1)
    local = engine.ask([IDS], tokens=6)[0]
    engine.forget()
    engine.in_core(take_released)
    before = engine.in_core(stall_seconds)
    warm = engine.ask([IDS], tokens=6)[0]
    assert warm.cached_tokens == local.cached_tokens == 6 * BLOCK
    assert warm.logprobs == local.logprobs and warm.token_ids == local.token_ids
    assert engine.in_core(take_released) == 1
    assert engine.settled() == engine.idle
    stalled = engine.in_core(stall_seconds) - before
    assert 0 < stalled < LAYERS * SLOW_S, "its step waited for what was missing, and not for all"


def test_beside_a_decode_and_a_second_request_on_the_prefix(engine: ServingEngine) -> None:
    engine.ask([IDS], tokens=1)
    cold = engine.ask([IDS, LONGER, OTHER], tokens=[6, 6, 60], cold=True)
    engine.settled()
    engine.forget()
    engine.in_core(take_released)
    engine.loaded()
    answers = engine.ask([OTHER, IDS, LONGER], tokens=[60, 6, 6])
    assert engine.in_core(take_released) >= 1
    for answer, right in zip(answers, (cold[2], cold[0], cold[1]), strict=True):
        assert difference(answer, right) < TOLERANCE
    assert answers[1].cached_tokens >= 6 * BLOCK and answers[2].cached_tokens >= 6 * BLOCK
    assert engine.settled() == engine.idle


def test_without_the_gates_the_answer_is_another(engine: ServingEngine) -> None:
    right = engine.ask([IDS], tokens=6, cold=True)[0]
    engine.settled()
    engine.forget()
    engine.in_core(leave_gates_out)
    wrong = engine.ask([IDS], tokens=6)[0]
    assert difference(wrong, right) > TOLERANCE
