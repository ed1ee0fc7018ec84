"""Whether a step's layer hooks can be relied on, decided before its forward runs.

A CUDA graph of the whole forward replays without Python, so no hook runs in it. The two model runners of vLLM say so
differently: the first keeps `FULL` in the forward context; the second calls with a dummy context that has no attention
metadata. Both leave attention metadata and another mode in place exactly when hooks will run.
"""

from __future__ import annotations

import enum


class GateMode(enum.Enum):
    """How a step waits for the layers loaded in it."""

    LAYERWISE = "layerwise"
    """Each layer's hook waits for that layer."""
    WHOLE = "whole"
    """The compute stream waits for every layer before the forward."""


def gate_mode(*, has_attention_metadata: bool, full_graph: bool) -> GateMode:
    """Decide for one step.

    Args:
        has_attention_metadata: the forward context carries attention metadata.
        full_graph: the forward context names a FULL graph.
    """
    if has_attention_metadata and not full_graph:
        return GateMode.LAYERWISE
    return GateMode.WHOLE
