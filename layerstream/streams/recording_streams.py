"""Streams and events of the recording device: those of the wrapped device, with vector clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from layerstream.streams.base import CopyBatch, Event, Graph, Stream
from layerstream.streams.copies import kept
from layerstream.streams.shadow import Clock

if TYPE_CHECKING:
    import torch

    from layerstream.streams.recording import RecordingDevice


class RecordingEvent:
    """See `layerstream.streams.base.Event`: an event of the wrapped device, and what comes before its point."""

    __slots__ = ("_device", "clock", "in_graph", "inner")

    def __init__(self, inner: Event, device: RecordingDevice) -> None:
        self.in_graph = inner.in_graph
        self.inner = inner
        self.clock: Clock = {}
        self._device = device

    def done(self) -> bool:
        """See `Event.done`. What the host does once it has seen True comes after the event."""
        done = self.inner.done()
        if done:
            self._device.host_saw(self.clock)
        return done


class Note(NamedTuple):
    """What a call means for clocks and bytes."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: str


class RecordingGraph(NamedTuple):
    """A graph of the wrapped device, and what each replay of it means."""

    inner: Graph
    notes: tuple[Note, ...]


class RecordingStream:
    """See `layerstream.streams.base.Stream`: a stream of the wrapped device."""

    __slots__ = ("_device", "clock", "host_version", "inner", "name", "number")

    def __init__(self, inner: Stream, number: int, device: RecordingDevice) -> None:
        self.name = inner.name
        self.inner = inner
        self.number = number
        self.clock: Clock = {}
        self.host_version = 0
        self._device = device

    @property
    def raw(self) -> Any:
        """The framework's stream beneath, where the wrapped stream has one."""
        return cast(Any, self.inner).raw

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        recording = cast(RecordingEvent, event)
        self.inner.record(recording.inner)
        self._device.note(self, "record", recording)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        recording = cast(RecordingEvent, event)
        self.inner.wait(recording.inner)
        self._device.note(self, "wait", recording)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        self.inner.copy(dst, src)
        self._device.note(self, "copy", dst, src)

    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`."""
        own = kept(batch)
        self.inner.copy_batch(batch)
        self._device.note(self, "copy_batch", own)

    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`. What was captured is recorded anew each time."""
        recording = cast(RecordingGraph, graph)
        self.inner.replay(recording.inner)
        self._device.note_replay(self, recording)

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`."""
        self.inner.launch(kernel, *args, **kwargs)
        self._device.note(self, "launch", kernel, *args, **kwargs)
