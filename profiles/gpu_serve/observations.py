"""What an engine's process tells about its measurements: one JSON object a line, written as soon as it is known, so
that a process that is ended in the middle has told all it knew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["engine", "cold", "own", "hit", "exact", "sensitive", "moved", "decode", "failed", "end"]
Case = Literal["", "whole", "last", "half"]

WHOLE: Case = "whole"
"""A prompt seen before: all blocks but the last are hit, up to a block of tokens is computed."""
LAST: Case = "last"
"""A prompt seen before that ends one token after a block: that token is computed, in a step like one of decoding."""
HALF: Case = "half"
"""A prompt whose first half was seen before: the other half is computed."""
CASES: tuple[Case, ...] = (WHOLE, LAST, HALF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement."""

    kind: Kind
    """cold, own (a hit in vLLM's own cache), hit (one that only the connector can serve): seconds to the first token.
    exact: 1 if a hit's logprobs equal those of vLLM's own in every bit, else 0. sensitive: 1 if another prefix changes
    the logprobs. moved: load seconds. decode: seconds a token. engine, failed and end: see `detail`."""
    case: Case = ""
    tokens: int = 0
    """Length of the prompt that was asked for; a case may shorten it."""
    round: int = 0
    value: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)

    def append(self, file: Path) -> None:
        """Add the line to `file`."""
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.case, f"{self.tokens} tokens" if self.tokens else "")))
        match self.kind:
            case "engine" | "end" | "failed":
                what = ", ".join(f"{name}: {value}" for name, value in self.detail.items())
            case "exact" | "sensitive":
                what = "yes" if self.value else "NO"
            case "moved":
                what = f"{self.value * 1e3:.2f} ms, stall {self.detail.get('stall_seconds', 0.0) * 1e3:.2f} ms"
            case _:
                what = f"{self.value * 1e3:.2f} ms"
        return " ".join(filter(None, (self.kind, where, what)))


def parse_lines(lines: Iterable[str]) -> list[Observation]:
    """Read lines that `Observation.append` wrote.

    Raises:
        ValueError: a line is something else.
    """
    found = []
    for line in lines:
        try:
            found.append(Observation(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{line!r} is no observation ({error})") from error
    return found
