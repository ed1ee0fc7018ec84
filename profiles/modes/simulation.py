"""One request that loads, beside others that decode: when it gets its first token, and what the others' tokens wait.

Exact arithmetic over the steps of an engine, in seconds:

- Steps follow each other without a gap. One that computes the others alone takes `step_s`; one that computes the
  request too takes `compute_layer_s` for each layer, and waits at a layer that has not arrived. Nothing else differs.
- A layerwise load begins with the request's own step. With two steps in flight its first layer is copied while the step
  before still runs.
- A parked load is submitted with a step of the others, and begins when that step ends: its writes come after everything
  that was queued before. Where nothing else runs it begins at once.
- A release is known at the end of the step in which its layer arrived, and reaches a step `lag_steps` later.

`tests/profiles/test_modes.py` holds it against the real engine on virtual streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerstream.decisions import LoadMode

IDLE_STEP_S = 1.8e-3
"""Of a step that computes nothing: vLLM's engine core makes 500 to 560 of them a second."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load, and the engine that it comes to."""

    load_layer_s: float
    compute_layer_s: float
    """Of the step that runs the request."""
    layers: int
    step_s: float
    """Of a step without it."""
    running: int
    lag_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What became of it, in seconds."""

    first_token: float
    """From the step in which the request could have run."""
    longest_gap: float
    """Between two tokens of another request, over all steps; 0 if there is none."""
    stall: float
    """That its step waited for layers."""


def simulate(case: Case, mode: LoadMode, release: int | None = None) -> Times:
    """Run the load.

    Args:
        case: what is run.
        mode: how the request waits.
        release: of a parked load, the layer (0-based) after which its request is released; None: after the last.
    """
    load, layers = case.load_layer_s, case.layers
    compute = mixed_layer_s(case)
    if mode is LoadMode.LAYERWISE:
        ahead = min(load, case.step_s) if case.running and case.lag_steps > 1 else 0.0
        return _times(case, 0.0, -ahead, compute)
    arrivals = layers if release is None else release + 1
    if case.running:
        begun, step, lag = case.step_s, case.step_s, case.lag_steps
    else:
        begun, step, lag = 0.0, IDLE_STEP_S, 0
    known = math.ceil((begun + arrivals * load) / step - _ROUNDING)
    return _times(case, (known + lag) * step, begun, compute)


def mixed_layer_s(case: Case) -> float:
    """Seconds that a layer of the request's step takes: no less than one of a step without it."""
    return max(case.compute_layer_s, case.step_s / case.layers) if case.running else case.compute_layer_s


def _times(case: Case, start: float, begun: float, compute: float) -> Times:
    """Of a step that starts at `start` and waits for the layers of a load that began at `begun`."""
    now = start
    for layer in range(case.layers):
        now = max(now, begun + (layer + 1) * case.load_layer_s) + compute
    length = now - start
    stall = length - case.layers * compute
    return Times(
        first_token=now,
        longest_gap=max(length, case.step_s) if case.running else 0.0,
        stall=0.0 if stall < _ROUNDING * length else stall,
    )
