from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from layerstream.errors import LayerStreamError
from tests.fuzz.machine import STATISTICS, ServingMachine
from tests.rigs.scheduler_faults import FAULTS

# A machine is a whole engine, and most of them are slow to draw.
SHORT = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=True,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A thousand engines say too much."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


# A minute on an idle machine.
@pytest.mark.timeout(900)
def test_whatever_clients_operators_and_bad_luck_do_no_byte_is_wrong_and_nothing_is_left_over() -> None:
    run_state_machine_as_test(ServingMachine, settings=SHORT)
    # So few machines may all be lucky.
    unlucky = type("Unlucky", (ServingMachine,), {"unlucky": True})
    run_state_machine_as_test(unlucky, settings=settings(SHORT, max_examples=20))
    seen = STATISTICS
    assert seen.steps > 2000
    assert min(seen.events[what] for what in ("blocks loaded", "chunks evicted", "preemptions")) > 0
    assert seen.events["blocks loaded from a shared pool"] > 0
    assert min(seen.events[what] for what in ("blocks promoted", "writes to tiers")) > 0
    assert min(seen.events[f"steps in {mode}"] for mode in ("FULL", "PIECEWISE", "NONE", "no forward")) > 100
    assert min(seen.faults[what] for what in ("report late", "jobs given up")) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    search = settings(SHORT, max_examples=600, phases=[Phase.generate], print_blob=False)
    seeded = seed(0)(type("Seeded", (ServingMachine,), {"fixed": fault.setup, "unlucky": fault.unlucky}))
    with pytest.raises((AssertionError, LayerStreamError)):
        run_state_machine_as_test(seeded, settings=search)
