"""How long work of a size takes, learned while it is done: seconds = fixed + sum of (seconds a unit) x (units).

Two windows, since two things change at different speeds. The *shape* (what is fixed, what grows with which size) comes
from sizes that traffic seldom mixes well: samples are kept in bins, an octave of each size wide, and of each bin only
the median counts, so a thousand loads of one size weigh no more than a few of another, and neither a stray nor a burst
of one size moves the line. It is fitted by least squares of relative errors, with no part negative (C. L. Lawson, R. J.
Hanson, "Solving Least Squares Problems", chapter 23). The *scale* is the median over the last samples of what was
measured by what the shape says: a device that is twice as slow from one minute to the next is seen after five samples,
and four strays in a row are not. Recursive least squares with forgetting was not taken: fed with one size for an hour
it forgets all others, and one stray moves it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

RECENT = 9
"""Samples of which the scale is the median, and samples kept in a bin."""
MOST_BINS = 64
HALF_LIFE = 256
"""Samples after which a bin that got none of them counts half."""
ENOUGH_SAMPLES = 16
"""From so many on an estimate is known."""
REFIT_EVERY = 8
"""Samples after which the shape is fitted anew: a fit takes a quarter of a millisecond."""
SPREAD_OF = 32
"""Samples whose errors make the spread."""
CARRIED = 3
"""Samples that a bin of an earlier run counts for: five new ones outvote it."""
_RIDGE = 1e-3
"""Weight of keeping every part but the first size's small: what samples do not tell apart counts for that one."""

Sample: TypeAlias = tuple[tuple[float, ...], float]
"""(Sizes, seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds by size."""

    fixed_s: float
    unit_s: tuple[float, ...]
    """For each size, seconds of one unit of it."""

    def times(self, factor: float) -> Line:
        """The same work, so many times slower."""
        return Line(fixed_s=self.fixed_s * factor, unit_s=tuple(unit * factor for unit in self.unit_s))

    def seconds(self, *sizes: float) -> float:
        """Of work of these sizes."""
        return self.fixed_s + sum(unit * size for unit, size in zip(self.unit_s, sizes, strict=True))


class _Bin:
    """Samples of about one size."""

    __slots__ = ("last", "samples")

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=RECENT)
        self.last = 0
        """Number of the last sample."""

    def middle(self) -> Sample:
        """The sample whose time by the first size is the median."""
        ordered = sorted(self.samples, key=lambda sample: sample[1] / sample[0][0])
        return ordered[len(ordered) // 2]


class Estimate:
    """See this module.

    Args:
        sizes: how many sizes there are. The first is above 0 in every sample.
    """

    def __init__(self, sizes: int) -> None:
        self.samples = 0
        """Learned so far, those of earlier runs included."""
        self.surprise = 0.0
        """ln(measured / estimated) of the last sample, by the estimate before it."""
        self._sizes = sizes
        self._bins: dict[tuple[int, ...], _Bin] = {}
        self._recent: deque[Sample] = deque(maxlen=RECENT)
        self._errors: deque[float] = deque(maxlen=SPREAD_OF)
        self._shape: Line | None = None
        self._shaped_at = 0
        """Samples that there were when it was fitted."""
        self._line: Line | None = None
        """The shape to scale; None until asked for."""

    @property
    def spread(self) -> float:
        """Median of |ln(measured / estimated)| over the last samples, each by the estimate before it; infinite if none
        could be compared."""
        return statistics.median(self._errors) if self._errors else math.inf

    @property
    def known(self) -> bool:
        """Whether there are enough samples to decide by."""
        return self.samples >= ENOUGH_SAMPLES

    @property
    def error(self) -> float:
        """Standard error of the natural logarithm of what is estimated, if errors were normal: that of a median of
        `RECENT` samples, 1.2533 sigma / sqrt(n), with sigma = 1.4826 times their median."""
        return 1.2533 * 1.4826 * self.spread / math.sqrt(RECENT)

    @property
    def line(self) -> Line | None:
        """Seconds by size; None before the first sample."""
        if self._line is None and self._bins:
            if self._shape is None or self.samples - self._shaped_at >= min(REFIT_EVERY, self.samples // REFIT_EVERY):
                self._shape, self._shaped_at = self._fitted(), self.samples
            self._line = self._scaled(self._shape)
        return self._line

    @property
    def largest(self) -> float:
        """Of the first size, among the samples that are kept."""
        return max((sample[0][0] for one in self._bins.values() for sample in one.samples), default=0.0)

    def learn(self, sizes: Sequence[float], seconds: float) -> None:
        """Take one sample in; nothing happens if it is of no use: no time, no size, or not finite."""
        if not (math.isfinite(seconds) and seconds > 0 and len(sizes) == self._sizes and sizes[0] > 0):
            return
        if not all(math.isfinite(size) and size >= 0 for size in sizes):
            return
        before = self.line
        if before is not None:
            self.surprise = math.log(seconds / max(before.seconds(*sizes), 1e-12))
            self._errors.append(abs(self.surprise))
        sample = (tuple(map(float, sizes)), seconds)
        self._recent.append(sample)
        self._put(sample)

    def seed(self, samples: Iterable[tuple[Sequence[float], float]], *, count: int, spread: float) -> None:
        """Begin with what was known before this run; what is learned goes over it.

        Args:
            samples: (sizes, seconds), at most one of each size.
            count: samples that they stand for.
            spread: how far those were from what they said: see `spread`.
        """
        for sizes, seconds in samples:
            sample = (tuple(map(float, sizes)), float(seconds))
            for _ in range(CARRIED):
                self._put(sample)
        self.samples = max(self.samples, count)
        self._shape = self._line = None
        self._errors.extend([spread] * CARRIED)

    def middles(self) -> list[Sample]:
        """One sample for each size that was seen: what `seed` takes."""
        return [one.middle() for one in self._bins.values()]

    def _put(self, sample: Sample) -> None:
        self.samples += 1
        self._line = None
        key = tuple(math.frexp(size)[1] for size in sample[0])
        found = self._bins.get(key)
        if found is None:
            if len(self._bins) >= MOST_BINS:
                del self._bins[min(self._bins, key=lambda each: self._bins[each].last)]
            found = self._bins[key] = _Bin()
        found.samples.append(sample)
        found.last = self.samples

    def _scaled(self, shape: Line) -> Line:
        """The shape, as fast as the last samples were."""
        if len(self._recent) <= RECENT // 2:
            return shape
        return shape.times(
            statistics.median(seconds / max(shape.seconds(*sizes), 1e-12) for sizes, seconds in self._recent)
        )

    def _fitted(self) -> Line:
        """The line through the bins' medians with the least squares of relative errors, and no part negative."""
        rows: list[tuple[float, list[float]]] = []
        for one in self._bins.values():
            sizes, seconds = one.middle()
            weight = 0.5 ** ((self.samples - one.last) / HALF_LIFE)
            rows.append((weight, [1.0 / seconds, *(size / seconds for size in sizes)]))
        count = self._sizes + 1
        # Columns are brought to one scale, or squares of bytes would drown those of seconds.
        norms = [math.sqrt(sum(weight * row[j] ** 2 for weight, row in rows)) or 1.0 for j in range(count)]
        scaled = [(weight, [value / norm for value, norm in zip(row, norms, strict=True)]) for weight, row in rows]
        square = [[sum(w * row[i] * row[j] for w, row in scaled) for j in range(count)] for i in range(count)]
        right = [sum(w * row[j] for w, row in scaled) for j in range(count)]
        for j in range(count):
            square[j][j] += _RIDGE if j != 1 else 1e-9
        best, parts = math.inf, [0.0] * count
        for length in range(1, count + 1):
            for chosen in itertools.combinations(range(count), length):
                found = _solved([[square[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
                if found is None or min(found) < 0.0:
                    continue
                # The squares' sum, less what is the same for all choices.
                rest = -sum(value * right[i] for value, i in zip(found, chosen, strict=True))
                if rest < best - 1e-12:
                    best, parts = rest, [0.0] * count
                    for value, i in zip(found, chosen, strict=True):
                        parts[i] = value / norms[i]
        return Line(fixed_s=parts[0], unit_s=tuple(parts[1:]))


def _solved(square: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a small symmetric system by elimination; None if it has no single one."""
    rows = [[*row, value] for row, value in zip(square, right, strict=True)]
    count = len(rows)
    for i in range(count):
        pivot = max(range(i, count), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-15:
            return None
        for j in range(i + 1, count):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [value - factor * above for value, above in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * count
    for i in reversed(range(count)):
        found[i] = (rows[i][-1] - sum(rows[i][j] * found[j] for j in range(i + 1, count))) / rows[i][i]
    return found
