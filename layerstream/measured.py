"""What worker halves measure with events of their device: how long forwards, loads and saves took, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What the forward of one step computes."""

    tokens: int
    """Tokens of all its requests."""
    pairs: int
    """(token, token it sees) in attention, summed over the requests."""


def attended(tokens: int, context: int) -> int:
    """Pairs of `tokens` consecutive tokens of one request, behind `context` others, that attention joins."""
    return tokens * context + tokens * (tokens + 1) // 2


@dataclass(slots=True, kw_only=True)
class Measured:
    """Samples since the last report, in order."""

    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """(tokens, pairs, seconds) of forwards, without what they waited at gates: see `StepWork`."""
    loads: list[tuple[str, int, float]] = field(default_factory=list)
    """(transfer path, bytes, seconds) of one step's loads, from the point at which the model could have gone on."""
    saves: list[tuple[str, int, float]] = field(default_factory=list)
    """(transfer path, bytes, seconds) of one step's saves."""

    def merge(self, other: Measured) -> Measured:
        """Both, as of two ranks; returns a new object."""
        return Measured(
            steps=[*self.steps, *other.steps], loads=[*self.loads, *other.loads], saves=[*self.saves, *other.saves]
        )

    def __bool__(self) -> bool:
        return bool(self.steps or self.loads or self.saves)
