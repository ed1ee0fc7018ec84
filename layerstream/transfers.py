"""One submission of blocks in one direction, and the events that follow it through the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind
from layerstream.pipeline.base import layer_groups
from layerstream.timeline import busy_seconds

if TYPE_CHECKING:
    from layerstream.pipeline.base import Move, TransferPath
    from layerstream.streams.base import Device, Event


@dataclass(slots=True, eq=False)
class Part:
    """Layers of a transfer that travel together, with one set of events."""

    layers: tuple[int, ...]
    begun: Event
    """Before its first copy."""
    done: Event
    """Its last byte has arrived."""
    joined: Event
    """Saves: the KV cache is not read any more."""
    gate: tuple[Event, Event] | None = None
    """Gated loads: the compute stream arrived at the gate, and went on."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Jobs that are moved together.

    It owns everything its queued work reads, and is kept until that work is done.
    """

    step: int
    kind: JobKind
    jobs: tuple[Job, ...]
    move: Move
    path: TransferPath
    path_name: str
    """How the blocks travel, for profilers."""
    nbytes: int
    groups: tuple[tuple[int, ...], ...]
    """Layers that are to travel together; all of one size but the last."""
    parts: list[Part] = field(default_factory=list)
    """What was queued, in its order."""
    part_of: dict[int, Part] = field(default_factory=dict)
    """Layer -> the part that carries it."""
    submitted: Event | None = None
    """The compute stream's point when the work was queued."""
    closed: Event | None = None
    """Gated loads: the compute stream's point at the end of the step."""
    written: set[int] = field(default_factory=set)
    """Saves: layers whose KV of the step is complete."""
    ended: Event | None = None
    """Loads submitted as one graph: all of it has run. The events of their parts are shared with later loads."""
    failed: bool = False
    """A part of it could not be queued."""
    in_graph: bool = False
    """Gated loads: the waits are nodes of the graph that the step replays, so nobody can time them."""

    @classmethod
    def of(
        cls,
        step: int,
        jobs: tuple[Job, ...],
        move: Move,
        path: TransferPath,
        *,
        layers: int,
        block_bytes: int,
        group: int,
    ) -> Transfer:
        """Describe the move of `jobs` by `path`, `group` layers at a time."""
        return cls(
            step=step,
            kind=jobs[0].kind,
            jobs=jobs,
            move=move,
            path=path,
            path_name=path.name,
            nbytes=move.count * block_bytes,
            groups=layer_groups(layers, group),
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests it moves blocks for, for messages."""
        return tuple(dict.fromkeys(job.request_id for job in self.jobs))

    def group_number(self, layer: int) -> int:
        """The group that carries `layer`."""
        return layer // len(self.groups[0])

    def group_of(self, layer: int) -> tuple[int, ...]:
        """The layers that travel with `layer`."""
        return self.groups[self.group_number(layer)]

    def busy_seconds(self, device: Device) -> float:
        """See `layerstream.timeline.busy_seconds`. All events are done."""
        if self.ended is not None:
            return max(0.0, device.elapsed(self.parts[0].begun, self.ended))
        origin = self.parts[0].begun
        return busy_seconds(
            (device.elapsed(origin, part.begun), device.elapsed(origin, part.done)) for part in self.parts
        )

    def add(self, part: Part) -> None:
        """`part` was queued."""
        self.parts.append(part)
        self.part_of.update(dict.fromkeys(part.layers, part))

    def finished(self) -> bool:
        """Whether every layer has arrived, and a gated load's step has passed all its gates. Never blocks.

        Raises:
            TransferError: an operation failed.
        """
        if self.ended is not None:
            arrived = self.ended.done()
        else:
            arrived = all(part.done.done() for part in reversed(self.parts))
        if arrived and self.failed:
            raise TransferError(f"a transfer of requests {', '.join(self.requests)} could not be queued whole")
        return arrived and (self.closed is None or self.closed.done())
