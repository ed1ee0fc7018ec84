"""The rows of this suite, and where a run is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from layerstream.cli.results import Results as RecordedResults
from layerstream.cli.results import Row, Target, markdown, read_results

__all__ = ("MAIN", "SECTIONS", "TIERS", "Results", "Row", "Section", "Target", "markdown", "read_results", "section_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows that are recorded together, in a file of their own."""

    name: str
    """Ends the name of the file; empty for the main one."""
    rows: tuple[str, ...]
    """Every row of a complete run, in the order of the table."""
    parts: tuple[str, ...] = ()
    """How the names of all other rows begin, in the order of the table; which rows there are depends on the device."""

    def place(self, name: str) -> int | None:
        """Where a row stands in the table; None if it is no row of this section."""
        if name in self.rows:
            return self.rows.index(name)
        return next((len(self.rows) + number for number, part in enumerate(self.parts) if name.startswith(part)), None)


MAIN = Section(
    name="",
    rows=(
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
    ),
    parts=("kernels: ", "paths: ", "submission: "),
)
TIERS = Section(
    name="tiers",
    rows=(
        "disk write: rate / fio's with O_DIRECT",
        "disk read: rate / fio's with O_DIRECT",
        "disk read with checks by the mover: rate / the store's alone",
        "start-up scan of 100,000 files",
        "Mooncake put, own memory: rate / the plain client's",
        "Mooncake get, own memory: rate / the plain client's",
        "Mooncake put, another owner's: rate / the plain client's",
        "Mooncake get, another owner's: rate / the plain client's",
        "LMCache put: rate / plain copies' with two RPCs",
        "LMCache get: rate / plain copies' with two RPCs",
        "TTFT from disk / from the host pool",
        "TTFT from Mooncake / from the host pool",
        "TTFT from LMCache / from the host pool",
        "cold TTFT, dead tiers / no tiers",
        "decode time per token, dead tiers / no tiers",
    ),
)
SECTIONS = (MAIN, TIERS)


@dataclass(slots=True, kw_only=True)
class Results(RecordedResults):
    """One run of this suite."""

    def add(self, row: Row) -> None:
        """Add one row.

        Raises:
            ValueError: it is in none of `SECTIONS`, or is there already.
        """
        if _place(row.name) is None or any(other.name == row.name for other in self.rows):
            raise ValueError(f"row {row.name!r} is unknown or was measured twice")
        self.rows.append(row)
        self.rows.sort(key=lambda each: _place(each.name) or (0, 0))

    def rows_of(self, section: Section) -> list[Row]:
        """The rows of a section."""
        return [row for row in self.rows if section.place(row.name) is not None]

    def complete(self, section: Section) -> bool:
        """Whether every row of a section has been added, measured or not, and one or more of each of its parts."""
        names = [row.name for row in self.rows]
        return set(section.rows) <= set(names) and all(
            any(name.startswith(part) for name in names) for part in section.parts
        )

    def write(self, folder: Path, section: Section) -> Path:
        """Write a section as `<UTC date>-<kind of host>[-<section>].json`, and the same as `.md`; returns the path of
        the JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.started:%Y-%m-%d}-{self.machine['kind']}"
        path = folder / (f"{stem}-{section.name}.json" if section.name else f"{stem}.json")
        written = replace(self, rows=self.rows_of(section))
        path.write_text(written.to_json(), encoding="utf-8")
        path.with_suffix(".md").write_text(f"# {path.stem}\n\n{markdown(written)}", encoding="utf-8")
        return path


def section_of(path: Path) -> Section:
    """Whose results a file holds, by its name."""
    named = (section for section in SECTIONS if section.name and path.stem.endswith(f"-{section.name}"))
    return next(named, MAIN)


def _place(name: str) -> tuple[int, int] | None:
    """Section of a row, and its place there; None if it is no row of this suite."""
    for number, section in enumerate(SECTIONS):
        if (place := section.place(name)) is not None:
            return number, place
    return None
