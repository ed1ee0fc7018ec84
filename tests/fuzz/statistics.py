"""What a run of the fuzzer has seen, as counts that add up over machines and processes."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Statistics:
    """Of all machines of a process."""

    machines: int = 0
    steps: int = 0
    """Of engines."""
    rules: Counter[str] = field(default_factory=Counter)
    """Carried out, by name."""
    setups: Counter[str] = field(default_factory=Counter)
    """Machines by what their engine was set to."""
    events: Counter[str] = field(default_factory=Counter)
    """What came of it: hits, evictions, preemptions, aborts by the state in which they came."""
    faults: Counter[str] = field(default_factory=Counter)
    """Injected ones that had an effect."""
    states: set[str] = field(default_factory=set)
    """Digests of the abstract states that were seen after a rule."""

    def visit(self, state: object) -> None:
        """An abstract state was seen; states are told apart by their representation."""
        self.states.add(hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest())

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        """As JSON types: distinct states by their number or, if `whole`, each of them."""
        return {
            "machines": self.machines,
            "steps": self.steps,
            **{name: dict(sorted(getattr(self, name).items())) for name in ("rules", "setups", "events", "faults")},
            "states": sorted(self.states) if whole else len(self.states),
        }

    def add(self, whole: dict[str, Any]) -> None:
        """Add what another process has seen, written by `to_json(whole=True)`."""
        self.machines += whole["machines"]
        self.steps += whole["steps"]
        for name in ("rules", "setups", "events", "faults"):
            getattr(self, name).update(whole[name])
        self.states.update(whole["states"])
