"""Races as they are told: both operations, the memory, and both places in the code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layerstream.streams.accesses import ranges
from layerstream.streams.labels import Labels
from layerstream.streams.shadow import Conflict, Operation


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that touch the same bytes in no fixed order."""

    first: Operation
    first_wrote: bool
    second: Operation
    second_wrote: bool
    start: int
    """Address of the first byte of the first stretch that both touch."""
    end: int
    nbytes: int
    """Bytes that both touch, in all stretches."""
    memory: str
    """What lies at `start`."""

    def __str__(self) -> str:
        first, second = (
            f"{operation.what} on stream {operation.stream!r} {'writes' if wrote else 'reads'} at {operation.site}"
            for operation, wrote in ((self.first, self.first_wrote), (self.second, self.second_wrote))
        )
        return (
            f"race on {self.nbytes} bytes from {self.memory}: {first}; {second}; no event orders them: record one "
            "after the first and make the other's stream wait for it"
        )


def races_of(conflicts: Iterable[Conflict], operation: Operation, *, wrote: bool, labels: Labels) -> list[Race]:
    """The races of one operation: one for each earlier operation, whatever the number of pages."""
    pairs: dict[tuple[int, bool], list[Conflict]] = {}
    for conflict in conflicts:
        pairs.setdefault((id(conflict.earlier.operation), conflict.wrote), []).append(conflict)
    races = []
    for group in pairs.values():
        together = ranges([(conflict.start, conflict.end) for conflict in group])
        start, end = together[0].tolist()
        nbytes = int((together[:, 1] - together[:, 0]).sum())
        first = group[0].earlier.operation
        races.append(Race(first, group[0].wrote, operation, wrote, start, end, nbytes, labels.name(start)))
    return races
