"""What a run measured: rows against their targets, where it ran, and both as JSON and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from layerstream.trials import Interval, median_interval, ratio_interval

ROWS = (
    "warm TTFT / vLLM's own prefix hit",
    "logprobs bit-equal to those of vLLM's own hit (1: yes)",
    "overlap ratio of a hit",
    "warm TTFT / LMCache multiprocess mode's",
    "cold TTFT, saving / no connector",
    "decode time per token, connector / none",
    "stream operations added in an idle step",
    "FULL decode graphs kept (1: yes)",
    "both hooks of a layer without work",
    "lookup of 1,000 chunks in 1,000,000, 2 blocks each",
    "lookup of 1,000 chunks in 1,000,000, 16 blocks each",
    "load through the staged path",
    "save through the staged path",
)
"""Every row of a complete run, in the order of the table."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a number should reach; "=" is for what holds of every sample or not at all."""

    relation: Literal["<=", ">=", "<", "="]
    value: float


class Row(msgspec.Struct, kw_only=True):
    """One line of the table, with every sample it was made from."""

    name: str
    unit: str = ""
    """Of the value; empty for ratios and counts."""
    scale: float = 1.0
    """Samples times this are in `unit`."""
    digits: int = 3
    """Decimals shown."""
    target: Target | None = None
    samples: list[float] = []
    """What the median and the interval are of, in seconds, bytes per second, or as a ratio or count."""
    pairs: list[tuple[float, float]] = []
    """Paired seconds; `samples` holds their ratios."""
    note: str = ""
    """What a reader needs to know beside the number."""
    failure: str = ""
    """Why there is no number."""

    @classmethod
    def of_pairs(cls, name: str, pairs: Sequence[tuple[float, float]], **others: Any) -> Row:
        """A row of ratios first / second."""
        return cls(name=name, pairs=list(pairs), samples=[first / second for first, second in pairs], **others)

    def interval(self) -> Interval:
        """Median and 95 % interval in seconds, bytes per second, or as a ratio or count.

        Raises:
            ConfigError: there is no sample.
        """
        return ratio_interval(self.pairs) if self.pairs else median_interval(self.samples)

    def measured(self) -> str:
        """The number as the table shows it: the median and, where samples differ, the interval; for a target that is
        exact the sample furthest from it."""
        if not self.samples:
            return "-"
        if self.target is not None and self.target.relation == "=":
            wanted = self.target.value
            worst = max(self.samples, key=lambda sample: abs(sample - wanted))
            return f"{worst * self.scale:.{self.digits}f} {self.unit}".rstrip()
        interval = self.interval()
        median, low, high = (
            f"{value * self.scale:.{self.digits}f}" for value in (interval.median, interval.low, interval.high)
        )
        spread = f" [{low}, {high}]" if interval.low != interval.high else ""
        return f"{median}{spread} {self.unit}".rstrip()

    def wanted(self) -> str:
        """The target as the table shows it."""
        if self.target is None:
            return "-"
        return f"{self.target.relation} {self.target.value * self.scale:g} {self.unit}".rstrip()

    def verdict(self) -> str:
        """met, missed, unresolved with the count; "not measured" if it failed; "-" without a target."""
        if not self.samples:
            return "not measured"
        match self.target:
            case None:
                return "-"
            case Target(relation="=", value=value):
                return "met" if all(sample == value for sample in self.samples) else "missed"
            case Target(relation=">=", value=value):
                return self.interval().verdict(at_least=value)
            case Target(value=value):
                return self.interval().verdict(at_most=value)


class Results(msgspec.Struct, kw_only=True):
    """One run."""

    started: datetime
    """UTC."""
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add one row.

        Raises:
            ValueError: it is not one of `ROWS`, or is there already.
        """
        if row.name not in ROWS or any(other.name == row.name for other in self.rows):
            raise ValueError(f"row {row.name!r} is unknown or was measured twice")
        self.rows.append(row)
        self.rows.sort(key=lambda each: ROWS.index(each.name))

    @property
    def complete(self) -> bool:
        """Whether every row has been added, measured or not."""
        return len(self.rows) == len(ROWS)

    def write(self, folder: Path) -> Path:
        """Write `<UTC date>-<kind of host>.json` and the same as `.md`; returns the path of the JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.started:%Y-%m-%d}-{self.machine['kind']}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        path.with_suffix(".md").write_text(f"# {path.stem}\n\n{markdown(self)}", encoding="utf-8")
        return path


def read_results(path: Path) -> Results:
    """Read what `Results.write` wrote.

    Raises:
        msgspec.ValidationError: it is something else.
    """
    return msgspec.json.decode(path.read_bytes(), type=Results)


def markdown(results: Results) -> str:
    """The table, notes under it, and where and on what it was measured."""
    lines = ["| what | measured | target | verdict | n |", "|---|---|---|---|---|"]
    notes = []
    for row in results.rows:
        mark = ""
        if note := row.failure or row.note:
            notes.append(note.replace("\n", " "))
            mark = f" ({len(notes)})"
        lines.append(f"| {row.name}{mark} | {row.measured()} | {row.wanted()} | {row.verdict()} | {len(row.samples)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    facts = {"run": f"{results.started:%Y-%m-%d %H:%M} UTC", "commit": results.commit}
    facts |= {name: str(value) for name, value in (results.settings | results.machine | results.versions).items()}
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join(lines) + "\n"
