"""What is decided about a hit: how much of it to load, and how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

REASONS = ("load", "load_part", "recompute", "unknown_rates", "trial", "fixed")
"""Why a decision is what it is, for counters."""


class LoadMode(Enum):
    """How a request is kept from reading KV that has not arrived."""

    LAYERWISE = "layerwise"
    """Its step waits for each layer."""
    PARKED = "parked"
    """It is not scheduled until enough has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """A request of whose prompt a part can be loaded."""

    num_tokens: int
    """Tokens of the request."""
    local_tokens: int
    """Of them the engine's own hit."""
    found_tokens: int
    """Beyond it, in the host pool: a multiple of `block_tokens`."""
    block_tokens: int
    block_bytes: int
    """Of one block over all layers, on the rank that has most; where windows have passed some, on average over the
    blocks that were found."""
    layers: int
    """On the rank that has most."""
    queued_bytes: int
    """Of loads submitted before it whose ranks have not answered."""
    running: int
    """Other requests that the last step computed tokens of and that have not ended."""
    step_s: float | None
    """Typical seconds of a step of those; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How much of a hit is loaded, and how."""

    tokens: int
    """To load, 0 for none; a multiple of the case's `block_tokens`."""
    mode: LoadMode
    release_after_layer: int | None
    """Parked: the request is released once this layer (0-based) has arrived; None: after the last."""
    reason: str
    """One of `REASONS`."""
    load_s: float | None
    """Seconds of the load; None if unknown."""
    recompute_s: float | None
    """Seconds of computing the same tokens; None if unknown."""
    stall_s: float | None
    """Of the load, what compute cannot hide; None if unknown."""


class Chooser(Protocol):
    """Decides about hits."""

    def choose(self, case: LoadCase) -> Decision:
        """Decide. Pure, and takes microseconds."""


class FixedMode:
    """Loads all that was found, always in one mode."""

    def __init__(self, mode: LoadMode) -> None:
        self.mode = mode

    def choose(self, case: LoadCase) -> Decision:
        """See `Chooser.choose`."""
        return Decision(
            tokens=case.found_tokens,
            mode=self.mode,
            release_after_layer=None,
            reason="fixed",
            load_s=None,
            recompute_s=None,
            stall_s=None,
        )
