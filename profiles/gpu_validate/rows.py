"""Rows of the validation: how each is made, judged and printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from layerstream.cli.results import Row, Target

__all__ = ["Row", "Target", "failed", "faults", "inconclusive", "not_run", "right", "row_from", "row_json", "table"]

_NOT_RUN = "not run: "
_INCONCLUSIVE = "inconclusive: "
YES, NO = "yes", "no"
WIDTHS = (58, 34, 14, 20)
"""Columns of the table in characters: what, measured, target, met. Notes take the rest."""
NOTE_WIDTH = 74


def right(name: str, wrong: Sequence[str] = (), note: str = "") -> Row:
    """A row of something that is right or wrong.

    Args:
        name: what was checked.
        wrong: what was found to be wrong.
        note: what a reader needs to know if nothing was.
    """
    shown = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    return Row(name=name, samples=[0.0 if wrong else 1.0], target=Target(relation="=", value=1.0), note=shown or note)


def not_run(name: str, why: str) -> Row:
    """A row that this machine cannot have."""
    return Row(name=name, failure=_NOT_RUN + why)


def failed(name: str, why: str) -> Row:
    """A row that ended in an error."""
    return Row(name=name, failure=why)


def inconclusive(name: str, why: str) -> Row:
    """A row whose check was shown to see nothing."""
    return Row(name=name, failure=_INCONCLUSIVE + why)


def met(row: Row) -> str:
    """Whether a row's target is met: yes, no, not run, inconclusive, measured only, or unresolved with the count."""
    if row.failure:
        for prefix in (_NOT_RUN, _INCONCLUSIVE):
            if row.failure.startswith(prefix):
                return prefix.removesuffix(": ")
        return NO
    verdict = row.verdict()
    return {"met": YES, "missed": NO, "-": "measured only", "not measured": NO}.get(verdict, verdict)


def faults(rows: Sequence[Row]) -> list[Row]:
    """Rows for which the run as a whole is not good: failed, missed, wrong, or checked by what sees nothing."""
    return [row for row in rows if met(row) in {NO, "inconclusive"}]


def _measured(row: Row) -> str:
    if row.target == Target(relation="=", value=1.0) and row.samples:
        return "right" if row.samples == [1.0] else "WRONG"
    return row.measured()


def _wanted(row: Row) -> str:
    return "right" if row.target == Target(relation="=", value=1.0) else row.wanted()


def table(rows: Sequence[Row]) -> str:
    """All rows, one below the other: what, measured, target, met, note."""
    lines = [_line(("what", "measured", "target", "met"), "note"), "-" * (sum(WIDTHS) + 2 * len(WIDTHS) + 40)]
    for row in rows:
        note = row.failure.removeprefix(_NOT_RUN).removeprefix(_INCONCLUSIVE) or row.note
        first, *rest = textwrap.wrap(" ".join(note.split()), NOTE_WIDTH) or [""]
        name, *more = textwrap.wrap(row.name, WIDTHS[0]) or [""]
        lines.append(_line((name, _measured(row), _wanted(row), met(row)), first))
        for number in range(max(len(rest), len(more))):
            cells = (more[number] if number < len(more) else "", "", "", "")
            lines.append(_line(cells, rest[number] if number < len(rest) else ""))
    return "\n".join(lines)


def _line(cells: Sequence[str], note: str) -> str:
    return ("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + "  " + note).rstrip()


def row_json(row: Row) -> dict[str, Any]:
    """A row as JSON holds it."""
    return asdict(row)


def row_from(data: dict[str, Any]) -> Row:
    """The row that `row_json` gave."""
    target = data["target"]
    pairs = [(first, second) for first, second in data["pairs"]]
    return Row(**{**data, "pairs": pairs, "target": None if target is None else Target(**target)})
