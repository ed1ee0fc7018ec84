"""Puts the table of a recorded run into docs/benchmarks.md: `python -m profiles.microbench.report [RESULTS.json]`.

Without an argument the latest run in profiles/results is taken.
"""

from __future__ import annotations

import sys
from pathlib import Path

from profiles.microbench.engine_process import ROOT
from profiles.microbench.results import markdown, read_results

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "profiles" / "results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def with_table(page: str, table: str) -> str:
    """`page` with what lies between its two marks replaced by `table`.

    Raises:
        ValueError: a mark is missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must contain {BEGIN} and {END}")
    return f"{head}{begin}\n\n{table}\n{end}{tail}"


def main() -> int:
    """Update the page; 1 if no run is recorded."""
    recorded = [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json"))
    if not recorded:
        print(f"no results in {RESULTS}; run `make bench` first")
        return 1
    source = recorded[-1]
    table = f"Recorded in `{source.name}`.\n\n{markdown(read_results(source))}"
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(f"{PAGE} shows {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
