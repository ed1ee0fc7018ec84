"""Layerwise or parked, and when a parked request is released: from what a layer takes to load and to compute.

With L layers, each taking b to load and c to compute, a load brings layer i at (i + 1) * b after it began. A step that
computes the request reaches that layer at i * c after it began, and holds up every request in it where the layer is not
there yet. So nobody waits if the step begins no sooner than `quiet_start` after the load: b where b <= c, and
L * b - (L - 1) * c otherwise.
"""

from __future__ import annotations

import math

from layerstream.decisions import LoadMode

_ROUNDING = 1e-9
"""Of a step or of a layer: what floating point may add to a number of them."""


def quiet_start(*, load_layer_s: float, compute_layer_s: float, layers: int, queued_s: float = 0.0) -> float:
    """Seconds from a load's submission to the earliest begin of its step that waits at no layer.

    Args:
        load_layer_s: to load one layer.
        compute_layer_s: to compute one layer of the step.
        layers: of the model, or of the rank.
        queued_s: until the load begins.
    """
    return queued_s + max(load_layer_s, layers * load_layer_s - (layers - 1) * compute_layer_s)


def choose_mode(
    *,
    load_layer_s: float,
    compute_layer_s: float,
    layers: int,
    step_s: float | None,
    running: int,
    queued_s: float = 0.0,
    lag_steps: int = 1,
) -> tuple[LoadMode, int | None]:
    """Decide how a request waits for its load.

    Layerwise where nothing else runs, since a step that waits for its layers then holds up nobody and starts soonest,
    and where a layer loads no slower than it computes: all but the first layer's load is hidden. Otherwise parked, and
    released so that its step begins as soon as it can without waiting at a layer. Steps follow each other without a
    gap, and a parked load begins where one of them ends, so it is known which step that is; the layer is the one that
    arrives closest to the middle of the span in which its arrival makes the request run in that step.

    Args:
        load_layer_s: to load one layer, at least 0.
        compute_layer_s: to compute one layer of the step that runs the request, other requests' tokens with it, at
            least 0. A step is never shorter than one without the request.
        layers: at least 1.
        step_s: of a step of the other requests; None if unknown, which counts as no time.
        running: other requests that are being computed.
        queued_s: until the load begins; below 0 where its first copies run ahead of the step that submits it.
        lag_steps: whole steps between the one in which a layer arrives and the one that a release then reaches: 1 where
            the device runs behind the host by less than a step, 2 with two steps in flight.

    Returns:
        The mode, and for a parked load the layer (0-based) after whose arrival the request is released; None: after
        the last, or not parked.
    """
    step = step_s or 0.0
    compute = max(compute_layer_s, step / layers)
    start = quiet_start(load_layer_s=load_layer_s, compute_layer_s=compute, layers=layers, queued_s=queued_s)
    if running == 0 or start <= compute + _ROUNDING * layers * load_layer_s:
        return LoadMode.LAYERWISE, None
    if load_layer_s == 0:
        return LoadMode.PARKED, None
    # Counted in layers from the load's begin: arrivals in (first, last] reach that step.
    if step:
        last = ((math.ceil(start / step - _ROUNDING) - lag_steps) * step - queued_s) / load_layer_s
        first = last - step / load_layer_s
        middle = (first + last) / 2
    else:
        first, middle, last = -math.inf, (start - queued_s) / load_layer_s, math.inf
    soonest = math.floor(max(0.0, first) + _ROUNDING) + 1
    latest = math.floor(min(last, layers) + _ROUNDING)
    arrived = max(soonest, min(latest, round(middle)))
    return LoadMode.PARKED, arrived - 1 if arrived < layers else None
