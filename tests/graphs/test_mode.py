"""When a step's hooks can be relied on, for both of vLLM's model runners."""

import pytest

from layerstream.graphs.mode import GateMode, gate_mode

# (runner and step, attention metadata in the context, context says FULL, hooks run in this step)
STEPS = [
    ("first runner, FULL", True, True, False),
    ("first runner, PIECEWISE", True, False, True),
    ("first runner, eager", True, False, True),
    ("second runner, FULL: dummy context", False, False, False),
    ("second runner, PIECEWISE", True, False, True),
    ("second runner, eager", True, False, True),
    ("no forward", False, False, False),
]


@pytest.mark.parametrize(("step", "metadata", "full", "hooks_run"), STEPS, ids=[step[0] for step in STEPS])
def test_hooks_are_relied_on_exactly_when_they_run(step: str, metadata: bool, full: bool, hooks_run: bool) -> None:
    mode = gate_mode(has_attention_metadata=metadata, full_graph=full)
    assert (mode is GateMode.LAYERWISE) == hooks_run, step
