"""What vLLM is told about requests: each sort of report once at most, and never of a request that it does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from layerstream.jobs import JobKind
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


class Told:
    """Listens to what vLLM's scheduler is told."""

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig, self._update = rig, rig.connector.update_connector_output
        rig.connector.update_connector_output = self._listen
        self.counts: Counter[tuple[str, str]] = Counter()
        """(what was told, request)"""

    def _listen(self, output: Any) -> None:
        self._update(output)
        assert not output.finished_sending, "nothing is kept for a request that has ended"
        named = {"received": output.finished_recving or (), "failed": output.failed_recving or ()}
        for what, names in named.items():
            self.counts.update((what, name) for name in names)
            assert {*names} <= set(self._rig.scheduler.requests)


@pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("well", [True, False], ids=["load ends well", "load fails"])
@pytest.mark.parametrize("abort", [None, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("report", [1, 3])
def test_a_parked_load_is_told_of_once_whenever_its_request_is_aborted(
    make_rig: MakeRig, recompute: bool, well: bool, abort: int | None, report: int
) -> None:
    rig = make_rig(options={"load_mode": "parked"})
    rig.scheduler.recompute_kv_load_failures = recompute
    ids = prompt(10 * BLOCK + 3)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    held, told = HeldJobs(rig), Told(rig)
    rig.add("warm", ids, max_tokens=2)
    for step in range(6):
        if step == abort:
            rig.abort("warm")
        loads = held.of(JobKind.PARKED_LOAD)
        if step == report and loads:
            held.holding = False
            held.let(*loads, failed=not well)
        rig.step()
    held.holding = False
    rig.run()
    assert_idle(rig)
    started = abort != 0
    assert told.counts["received", "warm"] == started
    assert told.counts["failed", "warm"] == (started and not well)
    # The same name again is another request.
    rig.serve("warm", ids)
    assert max(told.counts.values(), default=0) <= 2
    assert_idle(rig)


@pytest.mark.parametrize("ranks", [1, 3])
def test_gated_loads_and_saves_are_never_told_of(make_rig: MakeRig, ranks: int) -> None:
    rig = make_rig(ranks=ranks)
    told = Told(rig)
    for name in ("cold", "warm"):
        rig.serve(name, prompt(10 * BLOCK), max_tokens=20)
        assert rig.scheduler.reset_prefix_cache()
    assert rig.hits["warm"] == 9 * BLOCK and not told.counts


@pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("windows", [(None, 24), (24, None), (None, 16, 40)], ids=str)
def test_a_failed_load_over_several_groups_fails_its_request_alone(
    make_rig: MakeRig, recompute: bool, windows: tuple[int | None, ...]
) -> None:
    """Failures name requests and no blocks, whose numbers mean something within one group alone."""
    rig = make_rig(options={"load_mode": "parked"}, windows=windows, num_blocks=128)
    rig.scheduler.recompute_kv_load_failures = recompute
    ids, other = prompt(10 * BLOCK + 3), prompt(9 * BLOCK, seed=1)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    held, told = HeldJobs(rig), Told(rig)
    rig.add("warm", ids, max_tokens=2)
    rig.add("other", other, max_tokens=2)
    rig.step()
    (load,) = held.of(JobKind.PARKED_LOAD)
    assert len(load.groups) == len(windows)
    held.holding = False
    held.let(load, *held.of(JobKind.SAVE), failed=True)
    rig.run()
    assert told.counts == {("received", "warm"): 1, ("failed", "warm"): 1}
    assert len(rig.outputs["other"]) == 2
    if recompute:
        assert rig.outputs["warm"][:1] == rig.outputs["cold"]
    else:
        assert rig.requests["warm"].status is RequestStatus.FINISHED_ERROR
    assert_idle(rig, num_blocks=128)
