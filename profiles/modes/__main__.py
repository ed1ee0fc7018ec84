"""Layerwise or parked: the rule of `layerstream.modes` against every mode there is, in virtual time.

    python -m profiles.modes

Run it from the checkout; it takes seconds, needs no GPU, and says the same on every machine. It writes every case of
the grid as JSON, and the table and the picture of docs/modes.md. Exits 0 if the rule is never more than 2 % behind the
best mode and parks nobody to the harm of others, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from layerstream.decisions import LoadMode
from profiles.modes.grid import CLOSE, ERRORS, Row, cases, misjudged, row
from profiles.modes.page import draw, put_into, table
from profiles.modes.simulation import Case

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-9
_MODES = ("auto", "layerwise", "parked", "best")
COLUMNS = (
    *(field.name for field in fields(Case)),
    "mode",
    "release_after_layer",
    *(f"first_token_{mode}" for mode in _MODES),
    *(f"longest_gap_{mode}" for mode in _MODES),
)
"""Of each case in the JSON; seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    chosen = _parser().parse_args(arguments)
    rows = [row(case) for case in cases()]
    summary = summarise(rows)
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_recorded(its)) for its in rows)
    head = json.dumps({**summary, "columns": COLUMNS}, indent=1).removesuffix("\n}")
    (chosen.out / "modes.json").write_text(f'{head},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    page = chosen.docs / "modes.md"
    page.write_text(put_into(page.read_text(encoding="utf-8"), table()), encoding="utf-8")
    try:
        draw(chosen.docs / "images" / "modes.png")
    except ImportError:
        print("no picture: matplotlib is not installed")
    for name, value in summary.items():
        print(f"{name}: {value}")
    return int(summary["worst_loss"] > CLOSE or summary["worst_extra_gap_parked"] > 1 + ROUNDING)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the grid: how often each mode is chosen, and the worst of everything."""
    parked = [its for its in rows if its.mode is LoadMode.PARKED]
    layerwise = [its for its in rows if its.mode is LoadMode.LAYERWISE and its.case.running]
    off = [(its, times) for its in rows for times in misjudged(its.case)]
    return {
        "cases_tried": len(rows),
        "parked": len(parked),
        "layerwise_beside_others": len(layerwise),
        "worst_loss": max(its.loss for its in rows),
        "worst_extra_gap_parked": max(its.extra_gap for its in parked),
        "worst_extra_gap_layerwise": max(its.extra_gap for its in layerwise),
        "least_first_token_over_parked_to_the_end": min(
            its.auto.first_token / its.parked.first_token for its in parked
        ),
        "rates_off_by": f"{min(ERRORS)} to {max(ERRORS)}",
        "off_at_most_2_percent_behind": sum(times.first_token <= CLOSE * its.best.first_token for its, times in off)
        / len(off),
        "off_worst_loss": max(times.first_token / its.best.first_token for its, times in off),
        "off_worst_gap": max(times.longest_gap / its.parked.longest_gap for its, times in off if its.case.running),
    }


def _recorded(its: Row) -> list[Any]:
    times = (its.auto, its.layerwise, its.parked, its.best)
    values = [its.mode.value, its.release, *(one.first_token for one in times), *(one.longest_gap for one in times)]
    return [round(value, 9) if isinstance(value, float) else value for value in (*astuple(its.case), *values)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiles.modes", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "profiles" / "results" / "2026-11-30-modes", help="folder of the JSON"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder with modes.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
