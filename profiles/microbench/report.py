"""Puts the tables of recorded runs into docs/benchmarks.md: `python -m profiles.microbench.report [RESULTS.json ...]`.

Each section of the suite has a place of its own. Without arguments the latest run of each in profiles/results is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from profiles.microbench.engine_process import ROOT
from profiles.microbench.results import SECTIONS, Section, markdown, read_results, section_of

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "profiles" / "results"


def marks(section: Section) -> tuple[str, str]:
    """What a section's table stands between."""
    name = section.name or "results"
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def with_table(page: str, section: Section, table: str) -> str:
    """`page` with what lies between the two marks of a section replaced by `table`.

    Raises:
        ValueError: a mark is missing.
    """
    first, last = marks(section)
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{PAGE} must contain {first} and {last}")
    return f"{head}{begin}\n\n{table}\n{end}{tail}"


def latest(recorded: Sequence[Path]) -> dict[str, Path]:
    """The last file of each section, by the section's name."""
    return {section_of(path).name: path for path in recorded}


def main() -> int:
    """Update the page; 1 if no run is recorded."""
    sources = latest([Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json")))
    if not sources:
        print(f"no results in {RESULTS}; run `make bench` first")
        return 1
    for section in SECTIONS:
        if (source := sources.get(section.name)) is not None:
            table = f"Recorded in `{source.name}`.\n\n{markdown(read_results(source))}"
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), section, table), encoding="utf-8")
            print(f"{PAGE} shows {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
