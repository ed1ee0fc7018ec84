"""Eviction that lets a part of the new prompts go early where the pool is too small for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from layerstream.policies import LRU, Evictable, EvictionPolicy, UseOrder
from layerstream.reuse import ReuseAges

TRIAL = 0.1
"""Part of the pool that a new prompt may see filled before it goes, if it is not among those that are kept."""
PARTS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Parts of the new prompts that may be kept."""
_LEAD = 1.02
"""How much more a smaller part must promise before it is taken: what the ages say is an estimate."""
_CHOICES_PER_POOL = 4
_BEGIN = 1 << 40
"""Where the clock starts: above every offset, so that a chunk without a stamp goes right after the one behind it."""


class Probationer(Evictable, Protocol):
    """An item that remembers whether it is kept."""

    probation: bool
    """Whether it goes early unless it is used again; set by the policy that stamps it."""


Item = TypeVar("Item", bound=Probationer)


class AdaptiveInsertion(UseOrder[Item], EvictionPolicy[Item]):
    """Least recently used first, with two differences, each an offset of the stamp of last use.

    What was used again after it was made counts as used once more when the whole pool has been filled anew: chats that
    went on go on again more often than new ones do.

    Where prompts come back only after the pool was filled more than once, plain LRU keeps all of them for too short a
    time and hits nothing. Then only a part of the new prompts is kept, for longer, and the others are on probation:
    they go when `TRIAL` of the pool was filled, unless they are used before. With S slots and a part p kept, a kept
    prompt stays while about S / p slots are filled, so the hits to expect are

        within(TRIAL * S) + p * (within((1 - TRIAL) * S / p) - within(TRIAL * S))

    where `within` says how many blocks come back within that age (`ReuseAges`, which knows of what was evicted too).
    The largest part that promises about the most is taken. Where that is all of them, for which `within(S)` is to be
    expected, nothing is on probation. A prompt is new if it continues no other: what is appended to the end of a kept
    prompt is kept.

    To insert at the old end of an LRU list with a probability is bimodal insertion (Qureshi et al., Adaptive insertion
    policies for high performance caching, ISCA 2007).
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = PARTS[0]
        """Part of the new prompts that is kept."""
        self._slots = 0
        self._clock = _BEGIN
        """Counts slots filled with what is kept."""
        self._owed = 0.0
        """New prompts to be kept, less those that were."""
        self._ages = ReuseAges(windows=int(1 / PARTS[-1]))
        self._choose_at = 0

    def resize(self, slots: int) -> None:
        self._slots = slots

    def see(self, hashes: Sequence[Hashable]) -> None:
        self._ages.see(hashes, self._slots)

    def touch(self, item: Item) -> None:
        item.probation = False
        item.used = max(item.used, self._clock + self._slots)
        self.renew(item)

    def enter(self, item: Item, continues: Item | None) -> None:
        if continues is None:
            self._owed += self.part
            item.probation = self._owed < 1
            if not item.probation:
                self._owed -= 1
        else:
            item.probation = continues.probation
        if not item.probation:
            self._clock += 1
        self._ages.filled += 1
        if self._ages.filled >= self._choose_at:
            self._choose_at = self._ages.filled + max(1, self._slots // _CHOICES_PER_POOL)
            self._choose()

    def fill(self, item: Item) -> None:
        early = int((1 - TRIAL) * self._slots) if item.probation else 0
        item.used = max(item.used, self._clock - early)
        self.renew(item)

    def _choose(self) -> None:
        promised = [self._promise(part) for part in PARTS]
        enough = max(promised) / _LEAD
        self.part = next(part for part, hits in zip(PARTS, promised, strict=True) if hits >= enough)
        self._ages.fade()

    def _promise(self, part: float) -> float:
        if part == 1:
            return self._ages.within(self._slots)
        trial = self._ages.within(TRIAL * self._slots)
        return trial + part * (self._ages.within((1 - TRIAL) * self._slots / part) - trial)


POLICIES: Mapping[str, Callable[[], EvictionPolicy[Any]]] = {"adaptive": AdaptiveInsertion, "lru": LRU}
"""By the names of the option `eviction`."""
