"""One submission of blocks in one direction, and the events that follow it through the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.jobs import Job, JobKind

if TYPE_CHECKING:
    from layerstream.pipeline.base import Move
    from layerstream.streams.base import Device, Event


@dataclass(slots=True, eq=False)
class Transfer:
    """Jobs that are moved together, with one set of events per layer.

    It owns everything its queued work reads, and is kept until that work is done.
    """

    step: int
    kind: JobKind
    jobs: tuple[Job, ...]
    move: Move
    nbytes: int
    begun: list[Event]
    """Per layer: before its first copy."""
    done: list[Event]
    """Per layer: its last byte has arrived."""
    joined: list[Event] = field(default_factory=list)
    """Saves, per layer: the KV cache is not read any more."""
    gates: dict[int, tuple[Event, Event]] = field(default_factory=dict)
    """Gated loads: layer -> compute stream arrived at the gate, compute stream went on."""
    submitted: Event | None = None
    """The compute stream's point when the work was queued."""
    closed: Event | None = None
    """Gated loads: the compute stream's point at the end of the step."""
    queued: set[int] = field(default_factory=set)
    """Saves: layers already queued."""

    @classmethod
    def of(
        cls, step: int, jobs: tuple[Job, ...], move: Move, device: Device, layers: int, block_bytes: int
    ) -> Transfer:
        """Build one with fresh events."""
        kind = jobs[0].kind
        return cls(
            step=step,
            kind=kind,
            jobs=jobs,
            move=move,
            nbytes=move.count * block_bytes,
            begun=[device.event() for _ in range(layers)],
            done=[device.event() for _ in range(layers)],
            joined=[device.event() for _ in range(layers)] if kind is JobKind.SAVE else [],
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests it moves blocks for, for messages."""
        return tuple(dict.fromkeys(job.request_id for job in self.jobs))

    def finished(self) -> bool:
        """Whether every layer has arrived, and a gated load's step has passed all its gates. Never blocks.

        Raises:
            TransferError: an operation failed.
        """
        return all(event.done() for event in reversed(self.done)) and (self.closed is None or self.closed.done())
