"""A recorded run of the benchmarks: rows against their targets, where they were measured, and both as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from layerstream.errors import ConfigError
from layerstream.trials import Interval, median_interval, ratio_interval

Kind = TypeVar("Kind")

RELATIONS = ("<=", ">=", "<", "=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a number should reach; "=" is for what holds of every sample or not at all."""

    relation: Literal["<=", ">=", "<", "="]
    value: float


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table, with every sample it was made from."""

    name: str
    unit: str = ""
    """Of the value; empty for ratios and counts."""
    scale: float = 1.0
    """Samples times this are in `unit`."""
    digits: int = 3
    """Decimals shown."""
    target: Target | None = None
    samples: list[float] = field(default_factory=list)
    """What the median and the interval are of, in seconds, bytes per second, or as a ratio or count."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
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


@dataclass(slots=True, kw_only=True)
class Results:
    """One run."""

    started: datetime
    """UTC."""
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> str:
        """As `read_results` reads it."""
        return json.dumps({**asdict(self), "started": self.started.isoformat()}, indent=1) + "\n"


def read_results(path: Path) -> Results:
    """Read a file that `Results.to_json` made.

    Raises:
        ConfigError: it cannot be read, or is something else; the message names it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Results(
            started=datetime.fromisoformat(_field(data, "started", str)),
            settings=_field(data, "settings", dict),
            machine=_field(data, "machine", dict),
            versions=_field(data, "versions", dict),
            commit=_field(data, "commit", str),
            rows=[_row(row) for row in _field(data, "rows", list)],
        )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); pass a JSON file that `make bench` made"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold results of a benchmark run ({error}); pass a JSON file that `make bench` made, such "
            "as those in profiles/results"
        ) from error


def _field(data: object, name: str, kind: type[Kind]) -> Kind:
    if not isinstance(data, Mapping) or name not in data:
        raise ValueError(f"it has no {name!r}")
    value = data[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} is {type(value).__name__}, not {kind.__name__}")
    return value


def _row(data: object) -> Row:
    known = set(Row.__dataclass_fields__)
    row = dict(_field({"row": data}, "row", dict))
    name = _field(row, "name", str)
    if unknown := row.keys() - known:
        raise ValueError(f"row {name!r} has unknown fields {', '.join(sorted(map(str, unknown)))}")
    for each, kind in (("unit", str), ("note", str), ("failure", str), ("digits", int)):
        if each in row:
            _field(row, each, kind)
    if "scale" in row:
        _number(row["scale"], name)
    samples = [_number(value, name) for value in _field({"samples": [], **row}, "samples", list)]
    pairs = [
        (_number(first, name), _number(second, name)) for first, second in _field({"pairs": [], **row}, "pairs", list)
    ]
    target = row.get("target")
    if target is not None:
        relation = _field(target, "relation", str)
        if relation not in RELATIONS:
            raise ValueError(f"row {name!r} has the relation {relation!r}, which is none of {', '.join(RELATIONS)}")
        target = Target(relation=relation, value=_number(target.get("value"), name))  # type: ignore[arg-type]
    return Row(**{**row, "samples": samples, "pairs": pairs, "target": target})


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"row {name!r} holds {value!r} where a finite number belongs")
    return value


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
