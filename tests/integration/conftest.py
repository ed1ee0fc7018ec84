"""What tests on real engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.serving_engine import ServingEngine


@pytest.fixture
def nothing_is_left(engine: ServingEngine) -> Iterator[None]:
    """A test begins on the engine of its module as if nothing had been served, and leaves nothing behind."""
    engine.settled()
    engine.forget(connector=True)
    engine.loads()
    engine.preemptions()
    yield
    assert engine.closed or engine.settled() == engine.idle
