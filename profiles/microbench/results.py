"""The rows of this suite, and where a run is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from layerstream.cli.results import Results as RecordedResults
from layerstream.cli.results import Row, Target, markdown, read_results

__all__ = ("PARTS", "ROWS", "Results", "Row", "Target", "markdown", "read_results")

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
PARTS = ("kernels: ", "paths: ", "submission: ")
"""How the names of all other rows begin, in the order of the table; which rows there are depends on the device."""


@dataclass(slots=True, kw_only=True)
class Results(RecordedResults):
    """One run of this suite."""

    def add(self, row: Row) -> None:
        """Add one row.

        Raises:
            ValueError: it is none of `ROWS` and in none of `PARTS`, or is there already.
        """
        if _place(row.name) is None or any(other.name == row.name for other in self.rows):
            raise ValueError(f"row {row.name!r} is unknown or was measured twice")
        self.rows.append(row)
        self.rows.sort(key=lambda each: _place(each.name) or 0)

    @property
    def complete(self) -> bool:
        """Whether every row of `ROWS` has been added, measured or not, and one or more of each part."""
        names = [row.name for row in self.rows]
        return set(ROWS) <= set(names) and all(any(name.startswith(part) for name in names) for part in PARTS)

    def write(self, folder: Path) -> Path:
        """Write `<UTC date>-<kind of host>.json` and the same as `.md`; returns the path of the JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.started:%Y-%m-%d}-{self.machine['kind']}.json"
        path.write_text(self.to_json(), encoding="utf-8")
        path.with_suffix(".md").write_text(f"# {path.stem}\n\n{markdown(self)}", encoding="utf-8")
        return path


def _place(name: str) -> int | None:
    """Where a row stands in the table; None if it is no row of this suite."""
    if name in ROWS:
        return ROWS.index(name)
    return next((len(ROWS) + number for number, part in enumerate(PARTS) if name.startswith(part)), None)
