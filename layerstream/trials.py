"""Fair comparisons of noisy times: alternating pairs, a bootstrap interval, and a verdict against a target.

The two sides of a pair run back to back, so whatever slows the machine down for seconds slows both, and cancels in
their ratio. What is judged is therefore the *median of the pairs' ratios*; the ratio of two medians would compare runs
that never were neighbours. The median ignores the few pairs that something else on the machine has hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from layerstream.errors import ConfigError

First = TypeVar("First")
Second = TypeVar("Second")

CONFIDENCE = 0.95
RESAMPLES = 10_000
MAX_PAIRS = 30
"""Pairs after which a comparison that is still unresolved is written down as such."""
MIN_SAMPLES = 6
"""Fewest samples that can be judged: the median lies between the least and the greatest of n samples with probability
1 - 2 / 2**n, which reaches 95 % at 6. (H. A. David, H. N. Nagaraja, "Order Statistics", 3rd ed., section 7.1.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float
    samples: int

    def verdict(self, *, at_most: float | None = None, at_least: float | None = None) -> str:
        """Judge against a target: "met", "missed" or "unresolved, n = ...".

        Met if the whole interval keeps the target, its bounds included; missed if none of it does. Unresolved
        otherwise, and with fewer than `MIN_SAMPLES` samples.

        Args:
            at_most: the target of a quantity that should be small.
            at_least: the target of a quantity that should be large.

        Raises:
            ConfigError: not exactly one of the two is given.
        """
        if (at_most is None) == (at_least is None):
            raise ConfigError("a verdict needs one target: give either at_most or at_least")
        met = missed = False
        if self.samples >= MIN_SAMPLES:
            if at_most is not None:
                met, missed = self.high <= at_most, self.low > at_most
            elif at_least is not None:
                met, missed = self.low >= at_least, self.high < at_least
        return "met" if met else "missed" if missed else f"unresolved, n = {self.samples}"

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(samples: Sequence[float]) -> Interval:
    """The median of `samples` with its percentile bootstrap interval; seeded, so the same for the same input.

    B. Efron, R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    Raises:
        ConfigError: there is no sample, or one is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(f"a median needs one or more finite numbers, got {list(samples)!r}")
    drawn = np.random.default_rng(0).choice(values, size=(RESAMPLES, values.size))
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(np.median(drawn, axis=1), (tail, 1.0 - tail))
    return Interval(median=float(np.median(values)), low=float(low), high=float(high), samples=values.size)


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The median of first / second over pairs, with the interval from resampling whole pairs.

    Raises:
        ConfigError: there is no pair, or a time is not a finite number > 0.
    """
    if any(not (np.isfinite(side) and side > 0.0) for pair in pairs for side in pair):
        raise ConfigError(f"ratios need finite numbers > 0, got {list(pairs)!r}")
    return median_interval([first / second for first, second in pairs])


def alternate(first: Callable[[], First], second: Callable[[], Second], pairs: int) -> Iterator[tuple[First, Second]]:
    """Run both sides `pairs` times and yield their results as (first, second) as each pair ends.

    The side that begins changes from pair to pair (first-second, second-first, ...), so that neither always runs in
    the state the other leaves behind. Stop early by leaving the loop.
    """
    for index in range(pairs):
        if index % 2 == 0:
            a = first()
            b = second()
        else:
            b = second()
            a = first()
        yield a, b
