"""`layerstream bench --compare`: two recorded runs of the benchmarks, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerstream.cli.results import Results, Row, read_results
from layerstream.trials import CONFIDENCE, RESAMPLES, Interval

PASSING_FACTS = ("load average at start",)
"""What differs between any two runs of one machine."""

WIDTH = 160
"""Columns of the table where the output is no terminal, whose width rich would take for 80."""


def ratio_of_medians(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """median(first) / median(second), with its percentile bootstrap interval; seeded.

    Samples of two runs are no pairs, so each side is resampled by itself; what slowed a whole run is in the ratio.
    B. Efron, R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13.

    Returns:
        None where a side has no sample, or one that is not > 0.
    """
    if not first or not second or min(first) <= 0 or min(second) <= 0:
        return None
    source = np.random.default_rng(0)
    sides = [np.asarray(side, dtype=np.float64) for side in (first, second)]
    drawn = [np.median(source.choice(side, size=(RESAMPLES, side.size)), axis=1) for side in sides]
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(drawn[0] / drawn[1], (tail, 1.0 - tail))
    return Interval(
        median=float(np.median(sides[0]) / np.median(sides[1])),
        low=float(low),
        high=float(high),
        samples=min(side.size for side in sides),
    )


def differences(before: Results, after: Results) -> list[str]:
    """What else than the code differs between two runs, a line each: machine, versions and settings."""
    found = []
    for what in ("machine", "versions", "settings"):
        one: dict[str, Any] = getattr(before, what)
        other: dict[str, Any] = getattr(after, what)
        found += [
            f"{name}: {one.get(name, 'unknown')} in A, {other.get(name, 'unknown')} in B"
            for name in dict.fromkeys([*one, *other])
            if name not in PASSING_FACTS and one.get(name) != other.get(name)
        ]
    return found


def judged(before: Row, after: Row) -> str:
    """The verdict on `after` against the target that `before` was held to: a target that moved hides nothing."""
    return replace(after, target=before.target).verdict()


def regressions(before: Results, after: Results) -> list[str]:
    """Names of the rows that met their target in `before` and miss the same target in `after`."""
    old = {row.name: row for row in before.rows}
    return [
        row.name
        for row in after.rows
        if row.name in old and old[row.name].verdict() == "met" and judged(old[row.name], row) == "missed"
    ]


def run_compare(before_path: Path, after_path: Path) -> int:
    """Print run A beside run B; returns the exit status.

    Returns:
        1 if a row met its target in A and misses it in B, else 0.

    Raises:
        ConfigError: a file holds no results.
    """
    before, after = read_results(before_path), read_results(after_path)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    old, new = ({row.name: row for row in run.rows} for run in (before, after))
    console.print(_table(before, [(old[name], new[name]) for name in old if name in new], after))
    console.print("B / A is the ratio of the medians with its 95 % interval; the runs were not interleaved.")
    for here, there, side, path in ((old, new, "A", before_path), (new, old, "B", after_path)):
        if only := [name for name in here if name not in there]:
            console.print(f"only in {side} ({escape(str(path))}): {escape('; '.join(only))}", soft_wrap=True)
    for name in (name for name, row in new.items() if name in old and row.failure):
        console.print(f"{escape(name)}: not measured in B: {escape(new[name].failure)}", soft_wrap=True)
    if found := differences(before, after):
        console.print("[yellow]WARNING:[/] the runs differ in more than the code, so a ratio may say nothing about it:")
        console.print(escape("\n".join(f"  {line}" for line in found)), soft_wrap=True)
    worse = regressions(before, after)
    if worse:
        console.print(f"[bold red]Met in A, missed in B:[/] {escape('; '.join(worse))}", soft_wrap=True)
    return 1 if worse else 0


def _table(before: Results, rows: Sequence[tuple[Row, Row]], after: Results) -> Table:
    sides = (f"{name}: {run.commit}, {run.started:%Y-%m-%d}" for name, run in (("A", before), ("B", after)))
    table = Table("what", *sides, "B / A", "target", "verdict", title="Two runs", title_justify="left")
    for one, other in rows:
        # The median of an exact row says nothing: one sample that is off is a miss.
        exact = one.target is not None and one.target.relation == "="
        ratio = None if exact else ratio_of_medians(other.samples, one.samples)
        verdicts = dict.fromkeys((one.verdict(), judged(one, other)))
        cells = (
            one.name,
            one.measured(),
            other.measured(),
            "-" if ratio is None else str(ratio),
            one.wanted(),
            ", then ".join(verdicts),
        )
        table.add_row(*map(escape, cells))
    return table
