"""What must hold, and what was seen of it."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from profiles.soak.engine import Reply

TOLERANCE = 5e-6
"""Largest difference of two logprobs that are to be equal. KV is the same in every bit only if it was computed in the
same steps; with other splits of the prompt, or beside other requests, the tiny model's float32 logprobs of about -5
differ by 1e-6. What wrong bytes make of them is in the result of a run with `--control`."""
LONGEST_TTFT_S = 60.0
"""Tiers may hold a request for 20 s (layerstream.promotions), and there are others before it; hung, it never comes."""
MOST_NAMED = 50
"""Violations that are kept as text."""

_TIER = re.compile(r"(\w+) read (?:([\d.]+) MB|0 B)[^;,]*, wrote (?:([\d.]+) MB|0 B)([^;]*)")
_COUNT = re.compile(r"(\d+) (missing|damaged|refused|failures)")
_REST = re.compile(r"promoted (\d+) blocks|(\d+) requests (fell) to misses|(\d+) objects (not written)")


def difference(wanted: Reply, got: Reply) -> float:
    """Largest difference of the logprobs of two answers to one prompt; infinite if they are not alike at all.

    Answers are compared token by token. Where the likeliest two are so near each other that either may win, what
    follows is not comparable.
    """
    if len(wanted.logprobs) != len(got.logprobs):
        return math.inf
    most = 0.0
    for position, (one, other) in enumerate(zip(wanted.logprobs, got.logprobs, strict=True)):
        common = one.keys() & other.keys()
        if len(common) < 0.8 * len(one):
            return math.inf
        # NaN is greater than nothing, and must not pass.
        most = max(
            [most, *(gap if (gap := abs(one[token] - other[token])) <= math.inf else math.inf for token in common)]
        )
        if wanted.token_ids[position] != got.token_ids[position]:
            first, second = sorted(one.values())[-1:-3:-1]
            return most if first - second <= 2 * TOLERANCE else math.inf
    return most


@dataclass(slots=True)
class Tally:
    """Counts of a run; for any thread."""

    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tiers: dict[str, Counter[str]] = field(default_factory=dict)
    ttfts: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    largest_difference: float = 0.0
    violations: list[str] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    """What did not hold -> how often."""
    begun: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def violation(self, kind: str, text: str) -> None:
        """Something did not hold."""
        with self._lock:
            self.broken[kind] += 1
            if len(self.violations) < MOST_NAMED:
                self.violations.append(f"{time.monotonic() - self.begun:.1f} s: {kind}: {text}")

    def count(self, what: Counter[str], name: str, times: int = 1) -> None:
        with self._lock:
            what[name] += times

    def answered(self, wanted: Reply, got: Reply, prompt_tokens: int) -> None:
        """Check one answer."""
        if got.aborted:
            self.count(self.requests, "aborted")
            return
        if got.failed:
            self.violation("request failed", got.failed)
            return
        apart = difference(wanted, got)
        with self._lock:
            self.requests["served"] += 1
            self.requests["prompt tokens"] += prompt_tokens
            self.requests["cached tokens"] += got.cached_tokens
            self.ttfts.append(got.ttft_s)
            if apart <= TOLERANCE:
                self.largest_difference = max(self.largest_difference, apart)
        if not apart <= TOLERANCE:
            self.violation("wrong answer", f"logprobs differ by {apart:g}; {got.cached_tokens} of {prompt_tokens} hit")
        if got.ttft_s > LONGEST_TTFT_S:
            self.violation("late answer", f"first token after {got.ttft_s:.1f} s")

    def printed(self, line: str) -> None:
        """Take the counts from what an engine printed."""
        if "LayerStream tiers: " not in line:
            return
        text = line.partition("LayerStream tiers: ")[2]
        with self._lock:
            for name, read, wrote, rest in _TIER.findall(text):
                counts = self.tiers.setdefault(name, Counter())
                counts["kB read"] += round(float(read or 0) * 1000)
                counts["kB written"] += round(float(wrote or 0) * 1000)
                for count, what in _COUNT.findall(rest):
                    counts[what] += int(count)
            for blocks, fell, _, dropped, _ in _REST.findall(text):
                self.requests["promoted blocks"] += int(blocks or 0)
                self.requests["fell to misses"] += int(fell or 0)
                self.requests["objects not written"] += int(dropped or 0)

    def judge(self, *, tiers: list[str], faults: list[str]) -> None:
        """What must have happened at the end of a run, or it has shown nothing."""
        for name in tiers:
            if not self.tiers.get(name, Counter())["kB read"]:
                self.violation("nothing seen", f"no hit came from tier {name}")
        for name in faults:
            if not self.faults[name]:
                self.violation("nothing seen", f"fault {name!r} never happened")
        if not self.requests["served"]:
            self.violation("nothing seen", "no request was served")

    def to_json(self) -> dict[str, Any]:
        ordered = sorted(self.ttfts) or [0.0]
        return {
            "requests": dict(self.requests),
            "tiers": {name: dict(counts) for name, counts in sorted(self.tiers.items())},
            "faults": dict(sorted(self.faults.items())),
            "time to first token, s": {
                name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3)
                for name, part in (("median", 0.5), ("99 %", 0.99), ("longest", 1.0))
            },
            "largest difference of right logprobs": self.largest_difference,
            "tolerance": TOLERANCE,
            **self.notes,
            "broken": dict(self.broken),
            "violations": self.violations,
        }
