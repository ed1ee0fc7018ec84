"""When a step's hooks can be relied on: a model of what both of vLLM's model runners show, over every kind of step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from layerstream.graphs.mode import GateMode, gate_mode, replays_full_graph

RUNNERS = (1, 2)
CONFIGURED = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL")
SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Step:
    """A step that carries a load: what was asked of the runner, and what is left to compute of the loaded prompt."""

    runner: int
    configured: str
    micro_batches: bool
    remainder: str
    speculative: int
    sync: bool

    @property
    def replayed(self) -> str:
        """What the runner's dispatcher picks: FULL where every request has exactly 1 + K tokens, else the fallback."""
        # The scheduler pads a remainder of one token with placeholders to 1 + K.
        uniform = self.remainder in ("one", "one and K")
        if self.remainder == "none":
            return "nothing"
        if self.configured == "FULL_AND_PIECEWISE":
            return "FULL" if uniform else "PIECEWISE"
        return self.configured

    @property
    def hooks_run(self) -> bool:
        """Python runs around attention except in one graph of everything. Micro-batches run it once for each."""
        return self.replayed in ("NONE", "PIECEWISE")

    @property
    def shown(self) -> tuple[bool, bool, bool]:
        """(attention metadata in the context, context says FULL, attention metadata in the call)."""
        if self.replayed == "nothing":
            return False, False, False
        if self.runner == 1:
            return True, self.replayed == "FULL", False
        in_call = self.replayed == "FULL" and not self.micro_batches
        in_context = self.sync and self.replayed != "FULL" and not self.micro_batches
        return in_context, False, in_call

    def mode(self, *, in_graph_ready: bool = False) -> GateMode:
        metadata, context_full, in_call = self.shown
        full = replays_full_graph(has_attention_metadata=metadata, context_full=context_full, call_has_metadata=in_call)
        return gate_mode(has_attention_metadata=metadata, full_graph=full, in_graph_ready=in_graph_ready)

    @property
    def before_forward(self) -> bool:
        """The runner starts loads before the forward only in sync steps; other loads are parked and gate nothing."""
        return self.sync and self.replayed != "nothing"


STEPS = [
    Step(*values)
    for values in itertools.product(
        RUNNERS,
        CONFIGURED,
        (False, True),
        ("none", "one", "one and K", "many"),
        (0, SPECULATIVE_TOKENS),
        (True, False),
    )
]


def test_no_step_relies_on_hooks_that_do_not_run() -> None:
    wrong = [s for s in STEPS if s.before_forward and s.mode() is GateMode.LAYERWISE and not s.hooks_run]
    assert wrong == []


def test_steps_whose_hooks_run_are_gated_layer_by_layer_except_micro_batches_of_the_second_runner() -> None:
    lost = [s for s in STEPS if s.before_forward and s.hooks_run and s.mode() is not GateMode.LAYERWISE]
    assert lost == [s for s in STEPS if s.before_forward and s.hooks_run and s.runner == 2 and s.micro_batches]
    assert {(s.configured, s.remainder) for s in lost} >= {("NONE", "one"), ("PIECEWISE", "many")}


def test_waits_in_the_graph_are_relied_on_exactly_in_full_steps_that_are_seen_as_such() -> None:
    for step in STEPS:
        mode = step.mode(in_graph_ready=True)
        if not step.before_forward:
            continue
        if step.replayed != "FULL":
            assert mode is step.mode(), step
        elif step.runner == 2 and step.micro_batches:
            # Nothing tells such a step from one without a forward.
            assert mode is GateMode.WHOLE, step
        else:
            assert mode is GateMode.IN_GRAPH, step


def test_a_full_step_waits_whole_unless_its_graphs_hold_the_waits() -> None:
    full = [s for s in STEPS if s.before_forward and s.replayed == "FULL"]
    assert {(s.runner, s.remainder) for s in full} == set(itertools.product(RUNNERS, ("one", "one and K", "many")))
    assert {s.mode() for s in full} == {GateMode.WHOLE}


def test_what_a_late_call_shows_does_not_tell_that_the_forward_is_over() -> None:
    """Why the step's sync flag decides, and not the context: a late call of the first runner looks layerwise."""
    late = Step(1, "PIECEWISE", False, "many", 0, sync=False)
    assert late.mode() is GateMode.LAYERWISE and not late.before_forward
    assert Step(2, "PIECEWISE", False, "many", 0, sync=False).mode() is GateMode.WHOLE


@pytest.mark.parametrize("ready", [False, True])
def test_a_step_without_a_forward_waits_whole(ready: bool) -> None:
    idle = [s for s in STEPS if s.remainder == "none"]
    assert {s.mode(in_graph_ready=ready) for s in idle} == {GateMode.WHOLE}
