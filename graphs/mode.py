"""How a step waits for the layers loaded in it, decided before its forward runs.

A CUDA graph of the whole forward (FULL) replays without Python, so no hook runs in it. vLLM's two model runners say
so differently, and neither says when its forward is already over; what they show is in the table below.

| step | attention metadata in the context | context's mode | attention metadata in the call |
|---|---|---|---|
| first runner, FULL | yes | FULL | no |
| first runner, PIECEWISE or no graph | yes | PIECEWISE, NONE | no |
| second runner, FULL | no: dummy context | NONE | yes; no with micro-batches |
| second runner, PIECEWISE or no graph | yes; no with micro-batches | PIECEWISE, NONE | no |
| no forward | no | NONE | no |

A call that comes after the forward shows the first runner's row unchanged, and a dummy context in the second: whoever
asks must know by other means (the step's sync flag) that the forward is still to come.
"""

from __future__ import annotations

import enum


class GateMode(enum.Enum):
    """How a step waits for the layers loaded in it."""

    LAYERWISE = "layerwise"
    """Each layer's hook waits for that layer."""
    WHOLE = "whole"
    """The compute stream waits for every layer before the forward."""
    IN_GRAPH = "in_graph"
    """The step replays one graph, and a wait captured in it holds each layer (`layerstream.graphs.in_graph`)."""


def replays_full_graph(*, has_attention_metadata: bool, context_full: bool, call_has_metadata: bool) -> bool:
    """Whether a step replays one graph of its whole forward, as far as the two runners show it.

    Args:
        has_attention_metadata: the forward context carries attention metadata.
        context_full: the forward context names a FULL graph (the first runner).
        call_has_metadata: the call itself carries attention metadata (the second runner, which has no context then).
    """
    return context_full or (call_has_metadata and not has_attention_metadata)


def gate_mode(*, has_attention_metadata: bool, full_graph: bool, in_graph_ready: bool = False) -> GateMode:
    """Decide for one step.

    What is unclear waits whole, which is right for every step: a dummy context may be a FULL step, a step of
    micro-batches, or none at all.

    Args:
        has_attention_metadata: the forward context carries attention metadata.
        full_graph: see `replays_full_graph`.
        in_graph_ready: the graphs that the step may replay hold a wait for every layer. Never so with micro-batches or
            a drafter, whose layers run more than once or in graphs of their own.
    """
    if full_graph:
        return GateMode.IN_GRAPH if in_graph_ready else GateMode.WHOLE
    return GateMode.LAYERWISE if has_attention_metadata else GateMode.WHOLE
