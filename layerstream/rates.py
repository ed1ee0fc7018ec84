"""What this engine's work takes on this machine: loads, saves, forwards, decode steps, and the way from and to tiers.

Learned from what the ranks measure (`layerstream.measured`) and from how long tiers' jobs were under way, begun with
what a calibration or an earlier run found. All of it belongs to the scheduler half, which alone decides.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from layerstream.decisions import Decision
from layerstream.estimates import Estimate, Line
from layerstream.measured import Measured, attended

TRIAL_EVERY = 20
"""Of so many transfers that are not worth it one is made all the same: its rate may be out of date. Where it loses more
time than computing takes, of so many times more: trials cost no more than a twentieth of the computing."""
SURPRISE = 0.5
"""A sample is much faster than estimated if it is by this, as a natural logarithm, and by more than most others are."""
MOST_ERROR = 2.0
"""A standard error that is counted, as a natural logarithm: no more than a factor of seven."""
BEYOND = 4
"""A step of so many times the tokens of the largest that was measured is not known."""
STEPS = 32
"""Decode steps of which the typical one is the median."""
ENOUGH_STEPS = 5
CALIBRATED_SPREAD = 0.3
"""Taken for a calibration's: a machine in service is not as quiet as the one that was measured."""
CALIBRATED_COUNT = 16

LOAD, SAVE, PREFILL = "load", "save", "prefill"


class Rates:
    """Everything that was learned, by name.

    `load` and `save` are seconds by bytes of one rank, over all transfer paths; "load/PATH" and "save/PATH" the same of
    one path. `prefill` is seconds of a forward by (tokens, pairs), see `StepWork`. "promote/TIER" and "demote/TIER" are
    seconds by bytes of one rank that were on their way from or to a tier when a job was made, its own included: a tier
    does one job after the other.

    Args:
        stages: pipeline stages, of which a rank computes one and a token passes all.
        step_tokens: most tokens that the engine computes in a step.
    """

    def __init__(self, *, stages: int = 1, step_tokens: int = sys.maxsize) -> None:
        self.stages = stages
        self.step_tokens = step_tokens
        self.changes = 0
        """Samples learned by this object."""
        self._estimates: dict[str, Estimate] = {
            LOAD: Estimate(1), SAVE: Estimate(1), PREFILL: Estimate(2),
        }  # fmt: skip
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._decoded = 0
        self.step_s: float | None = None
        """Seconds from one step that only decodes to the next; None if too few were seen."""
        self._passed: dict[str, int] = {}
        """Name -> transfers that were not worth it since its last sample."""

    def learn(self, measured: Measured) -> None:
        """Take in what ranks measured."""
        for path, nbytes, seconds in measured.loads:
            self._learn(LOAD, (nbytes,), seconds)
            self._learn(f"{LOAD}/{path}", (nbytes,), seconds)
        for path, nbytes, seconds in measured.saves:
            self._learn(SAVE, (nbytes,), seconds)
            self._learn(f"{SAVE}/{path}", (nbytes,), seconds)
        for tokens, pairs, seconds in measured.steps:
            self._learn(PREFILL, (tokens, pairs), seconds)

    def promoted(self, tier: str, nbytes: int, seconds: float) -> None:
        """A job brought all its objects from a tier: `nbytes` were on their way, its own included, when it was made."""
        self._learn(f"promote/{tier}", (nbytes,), seconds)

    def demoted(self, tier: str, nbytes: int, seconds: float) -> None:
        """A job wrote all its objects to a tier: see `promoted`."""
        self._learn(f"demote/{tier}", (nbytes,), seconds)

    def passed(self, name: str) -> None:
        """A transfer that this rate is of was not worth it."""
        self._passed[name] = self._passed.get(name, 0) + 1

    def decided(self, decision: Decision) -> None:
        """Count what was decided about a hit."""
        if decision.reason == "recompute":
            self.passed(LOAD)

    def decoded(self, seconds: float) -> None:
        """From one step that only decoded to the next."""
        self._steps.append(seconds)
        self._decoded += 1
        # Called in every such step, where a median would be most of the cost.
        if self._decoded % ENOUGH_STEPS == 0:
            self.step_s = statistics.median(self._steps)

    def line(self, name: str, *, errors: float = 0.0) -> Line | None:
        """Seconds by size; None unless known well enough to decide by.

        Args:
            name: see this class.
            errors: so many standard errors above the estimate; below 0 under it.
        """
        estimate = self._estimates.get(name)
        line = estimate.line if estimate is not None and estimate.known else None
        if estimate is None or line is None or not errors:
            return line
        return line.times(math.exp(errors * min(estimate.error, MOST_ERROR)))

    def estimate(self, name: str) -> Estimate | None:
        """What is known by that name, well enough or not; None before the first sample."""
        return self._estimates.get(name)

    def names(self) -> list[str]:
        """Of everything that has samples."""
        return [name for name, estimate in self._estimates.items() if estimate.samples]

    def forward(self, tokens: int, *, errors: float = 0.0) -> Line | None:
        """Seconds of a forward by (tokens, pairs), for prompts in which so many tokens are to be computed; None if that
        is not known. Small steps may all take the same time, and say nothing of large ones. For `errors` see `line`."""
        if min(tokens, self.step_tokens) > BEYOND * self._estimates[PREFILL].largest:
            return None
        return self.line(PREFILL, errors=errors)

    def recompute_s(self, tokens: int, context: int, *, errors: float = 0.0) -> float | None:
        """Seconds that a prompt takes more if so many tokens of it, behind `context` others, are computed; None if that
        is not known. For `errors` see `line`."""
        forward = self.forward(tokens, errors=errors)
        return None if forward is None else self.stages * tokens_s(forward, tokens, context)

    def stale(self, name: str, loss: float) -> bool:
        """Whether a transfer of this name that is not worth it should be made: enough were passed over since its last
        sample, or that one was so much faster than estimated that the next may change what is decided.

        Args:
            name: see this class.
            loss: what the transfer is estimated to lose, as a part of the computing that it saves.
        """
        estimate = self._estimates.get(name)
        if estimate is not None and estimate.surprise < -max(SURPRISE, estimate.spread):
            return True
        return self._passed.get(name, 0) >= max(1.0, loss) * TRIAL_EVERY - 1

    def calibrated(self, loads: Sequence[tuple[int, float]]) -> None:
        """Begin with (bytes, seconds) of whole loads that a calibration measured. What was kept of earlier runs is
        better, and to be restored after."""
        if loads:
            samples = [((nbytes,), seconds) for nbytes, seconds in loads]
            self._estimates[LOAD].seed(samples, count=CALIBRATED_COUNT, spread=CALIBRATED_SPREAD)

    def state(self) -> dict[str, Any]:
        """What is worth keeping for a later run, as JSON has it: see `restore`."""
        return {
            name: {
                "count": estimate.samples,
                "spread": estimate.spread,
                "samples": [[list(sizes), seconds] for sizes, seconds in estimate.middles()],
            }
            for name, estimate in self._estimates.items()
            if estimate.known
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` gave in an earlier run.

        Raises:
            ValueError: it is no such thing; nothing was changed.
        """
        found: dict[str, Estimate] = {}
        try:
            for name, kept in state.items():
                samples = [(tuple(map(float, sizes)), float(seconds)) for sizes, seconds in kept["samples"]]
                sizes = 2 if name == PREFILL else 1
                spread = float(kept["spread"])
                if not (samples and spread >= 0 and all(_possible(*sample, sizes_given=sizes) for sample in samples)):
                    raise ValueError(f"{name} has samples that cannot be")
                estimate = found[str(name)] = Estimate(sizes)
                estimate.seed(samples, count=int(kept["count"]), spread=spread)
        except (TypeError, KeyError, AttributeError, OverflowError, ValueError) as error:
            raise ValueError(f"no state of rates: {error!r}") from error
        self._estimates.update(found)

    def _learn(self, name: str, sizes: tuple[float, ...], seconds: float) -> None:
        estimate = self._estimates.get(name)
        if estimate is None:
            estimate = self._estimates[name] = Estimate(len(sizes))
        estimate.learn(sizes, seconds)
        self._passed.pop(name, None)
        self.changes += 1


def tokens_s(forward: Line, tokens: int, context: int) -> float:
    """Seconds that consecutive tokens of one request, behind `context` others, add to a forward of one rank."""
    each, pair = forward.unit_s
    return each * tokens + pair * attended(tokens, context)


def _possible(sizes: tuple[float, ...], seconds: float, *, sizes_given: int) -> bool:
    """Whether a sample can have been measured."""
    finite = all(map(math.isfinite, (*sizes, seconds)))
    return finite and len(sizes) == sizes_given and sizes[0] > 0 and min(sizes) >= 0 and seconds > 0
