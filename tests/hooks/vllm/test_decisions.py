"""Load or recompute under vLLM's scheduler: rates are measured, decided by, and kept.

Copies and the model are made slow by sleeping, several times slower than the other, so the outcome is no race.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstream.decisions import LoadMode
from layerstream.measured import Measured
from layerstream.rates import LOAD, PREFILL, Rates
from tests.rigs.fixed_choice import FixedChoice
from tests.rigs.installed_tiers import write_weights
from tests.rigs.scheduler_rig import BLOCK, Chunked, SchedulerRig, prompt

PROMPT = prompt(6 * BLOCK + 4)
HIT = 6 * BLOCK
SLOW_COPY_S = 0.03
"""Of each layer."""
SLOW_TOKEN_S = 0.0004
"""Of each token in each layer."""
FAST_TOKEN_S = 0.0001


class TimedRig(SchedulerRig):
    """Its model takes a while for each token."""

    token_s = FAST_TOKEN_S
    copy_s = 0.0

    def __init__(self, folder: Path, **arguments: Any) -> None:
        options = {"sanitize": False, "recompute": "auto", **arguments.pop("options", {})}
        super().__init__(folder, options=options, prefix_caching=False, **arguments)
        for worker in self.workers:
            engine: Any = worker.worker.engine
            path = engine._paths.load(1)
            kernels = path._kernels
            path._kernels = kernels._replace(
                scatter_pages=self._slowed(kernels.scatter_pages), scatter_layers=self._slowed(kernels.scatter_layers)
            )

    def _slowed(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(self.copy_s)
            kernel(*args, **kwargs)

        return slow

    def _write(self, cache: Any, layer: int, name: str, scheduled: int) -> None:
        time.sleep(self.token_s * scheduled)
        super()._write(cache, layer, name, scheduled)

    @property
    def rates(self) -> Rates:
        rates = self.connector.scheduler._rates
        assert isinstance(rates, Rates)
        return rates

    @property
    def decisions(self) -> dict[str, int]:
        coordinator = self.connector.scheduler._coordinator
        assert coordinator is not None
        return dict(coordinator._stats.decisions)

    def serve_until(self, reason: str, *, most: int = 200) -> int:
        """Serve the prompt again and again until a hit is decided about for this reason; returns how often."""
        for times in range(1, most):
            before = self.decisions.get(reason, 0)
            hit = self.serve(f"{reason}-{time.monotonic_ns()}", PROMPT)
            if self.decisions.get(reason, 0) > before:
                self.last_hit = hit
                return times
        raise AssertionError(f"never decided for {reason!r}: {self.decisions}")


@pytest.fixture
def make_timed_rig(make_rig: Callable[..., Any]) -> Callable[..., TimedRig]:
    return lambda **arguments: make_rig(TimedRig, **arguments)


def slow_link(rig: TimedRig) -> None:
    """Serve until hits are computed, since loads are slow."""
    rig.copy_s = SLOW_COPY_S
    assert rig.serve("cold", PROMPT) == 0
    rig.serve_until("recompute")
    assert rig.last_hit == 0
    assert rig.rates.line(LOAD) is not None and rig.rates.line(PREFILL) is not None
    assert set(rig.decisions) == {"unknown_rates", "recompute"}


def test_a_load_slower_than_computing_is_computed_and_found_again_when_it_became_fast(
    make_timed_rig: Callable[..., TimedRig],
) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0})
    slow_link(rig)
    rig.copy_s = 0.0
    rig.serve_until("load")
    assert rig.last_hit == HIT
    assert rig.decisions["trial"] >= 1


def test_a_model_that_became_slower_than_loading_is_found_out_while_hits_are_computed(
    make_timed_rig: Callable[..., TimedRig],
) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0})
    slow_link(rig)
    rig.token_s = 10 * FAST_TOKEN_S
    rig.serve_until("load", most=20)
    assert rig.last_hit == HIT and "trial" not in rig.decisions


def test_a_load_faster_than_computing_is_loaded(make_timed_rig: Callable[..., TimedRig]) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0})
    rig.token_s = SLOW_TOKEN_S
    assert rig.serve("cold", PROMPT) == 0
    rig.serve_until("load")
    assert rig.last_hit == HIT
    assert set(rig.decisions) == {"unknown_rates", "load"}


@pytest.mark.parametrize("options", [{"recompute": "never"}, {"load_mode": "layerwise"}, {"load_mode": "parked"}])
def test_it_is_loaded_however_slow_that_is_if_so_asked_for(
    make_timed_rig: Callable[..., TimedRig], options: dict[str, Any]
) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0, **options})
    rig.copy_s = SLOW_COPY_S
    rig.serve("cold", PROMPT)
    for number in range(20):
        assert rig.serve(f"{number}", PROMPT) == HIT
    assert set(rig.decisions) == ({"unknown_rates", "load"} if "recompute" in options else {"fixed"})


def test_what_was_learned_is_there_for_the_next_engine(make_timed_rig: Callable[..., TimedRig]) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0})
    rig.copy_s = SLOW_COPY_S
    rig.serve("cold", PROMPT)
    rig.serve_until("recompute")
    rig.close()
    again = make_timed_rig(options={"log_interval_s": 0})
    assert again.rates.line(LOAD) is not None and again.rates.line(PREFILL) is not None
    again.serve("cold", PROMPT)
    assert again.serve("warm", PROMPT) == 0
    assert again.decisions == {"recompute": 1}


def test_steps_tell_ranks_what_they_compute_only_if_there_are_jobs(make_timed_rig: Callable[..., TimedRig]) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0})
    rig.add("a", PROMPT, max_tokens=4)
    plans = []
    while rig.scheduler.has_requests():
        plans.append(rig.step().kv_connector_metadata.plan)
    works = [plan.work for plan in plans if plan is not None and plan.jobs]
    assert [(work.tokens, work.pairs) for work in works] == [(100, 100 * 101 // 2)]


def test_a_decode_step_is_timed_once_others_like_it_came_before(make_timed_rig: Callable[..., TimedRig]) -> None:
    rig = make_timed_rig(options={"log_interval_s": 0, "save_decode": False})
    rig.token_s = 0.01
    rig.serve("a", PROMPT[:4], max_tokens=12)
    step_s = rig.rates.step_s
    assert step_s is not None and step_s >= 0.03


def test_a_request_that_ended_in_the_last_step_does_not_run_beside_the_next_one(
    make_timed_rig: Callable[..., TimedRig],
) -> None:
    rig = make_timed_rig()
    coordinator = rig.connector.scheduler._coordinator
    coordinator._chooser = chooser = FixedChoice(LoadMode.LAYERWISE)
    rig.serve("cold", PROMPT)
    rig.add("other", prompt(BLOCK, 1))
    rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    rig.add("alone", PROMPT)
    rig.step()
    rig.run()
    rig.add("long", prompt(BLOCK, 2), max_tokens=4)
    rig.step()
    rig.add("beside", PROMPT)
    rig.step()
    assert [case.running for case in chooser.cases] == [0, 1]
    rig.run()


@pytest.mark.parametrize(
    "windows",
    [(None,), (None, 2 * BLOCK), (2 * BLOCK,), (Chunked(3 * BLOCK), None)],
    ids=["all", "some", "one", "chunks"],
)
def test_a_hit_counts_the_bytes_that_its_load_moves(
    make_timed_rig: Callable[..., TimedRig], monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]
) -> None:
    rig = make_timed_rig(windows=windows)
    coordinator = rig.connector.scheduler._coordinator
    coordinator._chooser = chooser = FixedChoice(LoadMode.LAYERWISE)
    long = prompt(20 * BLOCK + 4)
    rig.serve("cold", long)
    moved: list[int] = []
    learn = rig.rates.learn

    def learned(measured: Measured) -> None:
        moved.extend(nbytes for _, nbytes, _ in measured.loads)
        learn(measured)

    monkeypatch.setattr(rig.rates, "learn", learned)
    assert rig.serve("warm", long) == 20 * BLOCK
    (case,), blocks = chooser.cases, 20
    # Of a chunk of attention, a load brings as much as lies before the hit's end.
    spare = coordinator._hit_bytes(1) if isinstance(windows[0], Chunked) else 0
    assert moved[0] <= coordinator._hit_bytes(blocks) <= moved[0] + spare
    assert case.block_bytes == coordinator._hit_bytes(blocks) // blocks
    assert coordinator._queued_bytes == 0


@pytest.mark.parametrize("mode", LoadMode)
def test_eviction_hears_once_of_a_prompt_that_is_loaded(
    make_timed_rig: Callable[..., TimedRig], monkeypatch: pytest.MonkeyPatch, mode: LoadMode
) -> None:
    rig = make_timed_rig()
    coordinator = rig.connector.scheduler._coordinator
    coordinator._chooser = FixedChoice(mode)
    rig.serve("cold", PROMPT)
    heard: list[int] = []
    monkeypatch.setattr(coordinator._index._policy, "see", lambda hashes: heard.append(len(hashes)))
    assert rig.serve("warm", PROMPT) == HIT
    assert heard == [HIT // BLOCK]


@pytest.mark.parametrize(
    ("options", "weighed"),
    [
        ({"load_mode": "auto"}, True),
        ({"load_mode": "auto", "recompute": "never"}, False),
        ({"load_mode": "parked"}, False),
    ],
)
def test_what_tiers_have_is_weighed_only_if_all_hits_are(
    make_timed_rig: Callable[..., TimedRig], tmp_path: Path, options: dict[str, Any], weighed: bool
) -> None:
    write_weights(tmp_path)
    rig = make_timed_rig(options={**options, "tiers": [{"type": "disk", "path": f"{tmp_path}-disk", "gib": 0.01}]})
    tiering = rig.connector.scheduler._coordinator.tiering
    assert (tiering.promotions._worth is not None) == weighed
