"""A long prompt in plain English, made from a few words."""

from __future__ import annotations

import random
from collections.abc import Callable


def prompt_of(tokenize: Callable[[str], list[int]], *, tokens: int) -> list[int]:
    """A prompt of exactly `tokens` tokens of English sentences, the same each time."""
    draw = random.Random(0)
    pick = draw.choice
    text = ["From the log of a weather station."]
    while True:
        text += [
            f"{pick(_WHEN)} {pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHERE)}, {pick(_WHY)}; "
            f"the {pick(_GAUGE)} read {draw.randrange(10, 990) / 10} at {draw.randrange(24)}:{draw.randrange(10, 60)}."
            for _ in range(50)
        ]
        ids = tokenize(" ".join(text))
        if len(ids) >= tokens:
            return ids[:tokens]


_WHEN = ("At dawn", "Before noon", "After the storm", "Late that night", "On the third day", "During the long watch")
_WHO = ("the keeper", "her brother", "a young surveyor", "the ferry's captain", "the new assistant", "old Marten")
_DID = ("repaired", "carried", "measured", "forgot", "painted", "buried", "sold", "described", "photographed")
_WHAT = ("the brass barometer", "two crates of lamp oil", "a map of the reef", "the broken mast", "a letter from home")
_WHERE = ("on the north pier", "below the lighthouse", "beside the frozen lake", "in the archive", "at the old mill")
_WHY = ("because the wind had turned", "although nobody had asked", "as the manual demands", "to settle a bet")
_GAUGE = ("thermometer", "rain gauge", "tide mark", "hygrometer", "wind vane", "clock in the hall")
