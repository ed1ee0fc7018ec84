"""One submission of blocks in one direction, and the events that follow it through the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind
from layerstream.pipeline.base import layer_groups
from layerstream.timeline import busy_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from layerstream.geometry import KVGeometry
    from layerstream.measured import StepWork
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A step's forward, and what it waited for."""

    work: StepWork
    begun: Event
    """The compute stream's point before it."""
    ended: Event
    """The compute stream's point behind it, before the step's saves are joined."""
    load: Transfer | None
    """What it was gated by."""

    def waited(self, device: Device) -> float:
        """Seconds that it spent at gates. All events are done."""
        gates = [part.gate for part in self.load.parts] if self.load is not None else []
        return sum(device.elapsed(*gate) for gate in gates if gate is not None)


@dataclass(slots=True, eq=False)
class Transfer:
    """Jobs that are moved together.

    It owns everything its queued work reads, and is kept until that work is done.
    """

    step: int
    kind: JobKind
    jobs: tuple[Job, ...]
    moves: tuple[Move | None, ...]
    """For each KV cache group; None where windows have passed all of its blocks."""
    cache_groups: tuple[int, ...]
    """KV cache group of each layer."""
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
    release_layer: int | None = None
    """Parked loads: the layer after whose arrival its request is released, if that is not the last."""
    told: bool = False
    """Parked loads: whether it was reported released."""
    layerwise: bool = False
    """Gated loads: the hooks of the step run, and each waits for its own layer."""
    in_graph: bool = False
    """Gated loads: the waits are nodes of the graph that the step replays, so nobody can time them."""

    @classmethod
    def of(
        cls,
        step: int,
        jobs: tuple[Job, ...],
        moves: tuple[Move | None, ...],
        path: TransferPath,
        *,
        geometry: KVGeometry,
        group: int,
    ) -> Transfer:
        """Describe the move of `jobs` by `path`, `group` layers at a time."""
        cache_groups = geometry.cache_groups or (0,) * len(geometry.layers)
        counts = [0 if move is None else move.count for move in moves]
        return cls(
            step=step,
            kind=jobs[0].kind,
            jobs=jobs,
            moves=moves,
            cache_groups=cache_groups,
            path=path,
            path_name=path.name,
            nbytes=sum(
                layer.page_bytes * counts[its] for layer, its in zip(geometry.layers, cache_groups, strict=True)
            ),
            groups=layer_groups(len(geometry.layers), group),
            release_layer=jobs[0].released_at(len(geometry.layers)),
        )

    @property
    def blocks(self) -> int:
        """Blocks it moves in the KV cache group that has most."""
        return max(move.count for move in self.moves if move is not None)

    @property
    def mode(self) -> str:
        """Loads: how it is waited for (`layerstream.metrics.LOAD_MODES`)."""
        if self.kind is JobKind.PARKED_LOAD:
            return "parked"
        if self.in_graph:
            return "in_graph"
        return "layerwise" if self.layerwise else "whole"

    def batches(self, layers: Sequence[int]) -> list[tuple[Sequence[int], Move]]:
        """Cut layers by KV cache group, those with nothing to move left out: each part with what it moves."""
        if len(self.moves) == 1 and self.moves[0] is not None:
            return [(layers, self.moves[0])]
        parts: dict[int, list[int]] = {}
        for layer in layers:
            parts.setdefault(self.cache_groups[layer], []).append(layer)
        return [(part, move) for group, part in parts.items() if (move := self.moves[group]) is not None]

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

    def exposed_seconds(self, device: Device) -> float:
        """The part of a load's `busy_seconds` that lies after its submission: before, an earlier step computes anyway.
        All events are done."""
        assert self.submitted is not None
        origin = self.submitted
        if self.ended is not None:
            return max(0.0, device.elapsed(origin, self.ended))
        spans = ((device.elapsed(origin, part.begun), device.elapsed(origin, part.done)) for part in self.parts)
        return busy_seconds((max(0.0, begin), end) for begin, end in spans if end > 0.0)

    def add(self, part: Part) -> None:
        """`part` was queued."""
        self.parts.append(part)
        self.part_of.update(dict.fromkeys(part.layers, part))

    def released(self) -> bool:
        """Whether a parked load's request may be released by now and nobody was told. True once; never blocks.

        Raises:
            TransferError: an operation failed.
        """
        if self.told or self.release_layer is None or self.failed:
            return False
        parts = self.parts[: self.group_number(self.release_layer) + 1]
        self.told = all(part.done.done() for part in reversed(parts))
        return self.told

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
