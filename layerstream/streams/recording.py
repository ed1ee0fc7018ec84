"""A device that finds races: it wraps another and checks that events order every two accesses that conflict.

Every stream and the host has a vector clock. What is queued on a stream comes after what the host did before, after
what the stream was given before, and after the events it waited for. The host comes after an event that it has seen
done, after the compute stream's waits where that is the calling thread (`CpuDevice`), and after everything once the
device is closed. Two accesses to the same byte of which one writes, and of which neither comes before the other, are a
race, whatever order they happened to take this time.

Seen are copies, uploads of tables, and kernels whose accesses are declared. What does not pass this seam, like the
model's own kernels, is told with `declare` and `host_access`. Calls come from one thread.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from layerstream.errors import RaceError
from layerstream.streams.accesses import (
    Accesses,
    AccessFunction,
    Ranges,
    batch_accesses,
    copy_accesses,
    declared,
    overlaps,
    ranges,
    spans,
)
from layerstream.streams.base import Device, Event, Stream
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.labels import Labels
from layerstream.streams.races import Race, races_of
from layerstream.streams.recording_streams import Note, RecordingEvent, RecordingGraph, RecordingStream
from layerstream.streams.shadow import Access, Clock, Conflict, Operation, Shadow, join
from layerstream.streams.tables import TableCopies

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["MAX_RACES", "Race", "RaceError", "RecordingDevice"]

MAX_RACES = 1000
"""Races that are kept; one missing event makes a new one at every step."""

Touched: TypeAlias = Iterable[tuple[int, int]] | Ranges
"""Ranges of addresses, as pairs or as `layerstream.streams.accesses.spans` gives them."""

_HERE = str(Path(__file__).parent)
_HOST = 0


class RecordingDevice:
    """See `layerstream.streams.base.Device`. Everything is done by the wrapped device, and looked at here."""

    def __init__(
        self,
        inner: Device,
        *,
        accesses: Mapping[Callable[..., None], AccessFunction] | None = None,
        raise_on_race: bool = False,
    ) -> None:
        """
        Args:
            inner: the device that does the work.
            accesses: what kernels touch (see `layerstream.streams.accesses`).
            raise_on_race: raise `RaceError` at the second operation of a race, which has been queued by then.
        """
        self.inner = inner
        self.kind = inner.kind
        self.races: list[Race] = []
        """Those found, in the order found; the first `MAX_RACES`."""
        self.undeclared: set[str] = set()
        """Kernels that were launched and touch what nobody declared."""
        self.tables = TableCopies()
        """What tables hold. `tables.set` tells of tensors that were not made by `table`."""
        self._accesses = accesses or {}
        self._raise = raise_on_race
        self._shadow = Shadow()
        self._labels = Labels()
        self._streams: dict[Any, RecordingStream] = {}
        self._host: Clock = {}
        self._host_version = 0
        self._capturing: list[Note] | None = None
        self._watched: set[int] = set()
        # Filled by whichever thread drops the memory; emptied by the one that makes the calls.
        self._freed: deque[tuple[int, int]] = deque()

    def compute(self) -> RecordingStream:
        """See `Device.compute`."""
        return self._wrapped(self.inner.compute())

    def stream(self, name: str, *, priority: int) -> RecordingStream:
        """See `Device.stream`."""
        return self._wrapped(self.inner.stream(name, priority=priority))

    def event(self, *, in_graph: bool = False) -> RecordingEvent:
        """See `Device.event`."""
        return RecordingEvent(self.inner.event(in_graph=in_graph), self)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> RecordingGraph:
        """See `Device.capture`."""
        before, self._capturing = self._capturing, []
        try:
            inner = self.inner.capture(cast(RecordingStream, stream).inner, queue)
            return RecordingGraph(inner, tuple(self._capturing))
        finally:
            self._capturing = before

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`."""
        return self.inner.elapsed(cast(RecordingEvent, start).inner, cast(RecordingEvent, end).inner)

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        memory = self.inner.empty(nbytes)
        self._watch(memory, new=True)
        self._labels.add(memory.data_ptr(), memory.data_ptr() + nbytes, f"device memory of {nbytes} bytes")
        return memory

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """See `Device.table`. Counts as written by the compute stream on every device."""
        table = self.inner.table(values)
        self._watch(table, new=True)
        self.tables.set(table, values)
        self._labels.add(table.data_ptr(), table.data_ptr() + table.nbytes, f"table of {table.numel()} ids")
        self.declare(self.compute(), writes=spans(table), what="table")
        return table

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`."""
        closed = self.inner.close(timeout_s)
        if closed:
            for stream in self._streams.values():
                self.host_saw(stream.clock)
        return closed

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Name memory for messages: a tensor's bytes, or its whole storage if the tensor is not contiguous."""
        self._watch(tensor)
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if not tensor.is_contiguous():
            start = tensor.untyped_storage().data_ptr()
            end = start + tensor.untyped_storage().nbytes()
        self._labels.add(start, end, name)

    def declare(self, stream: Stream, *, reads: Touched = (), writes: Touched = (), what: str) -> None:
        """Say what work queued on `stream` touches that does not pass this device, like the model's kernels."""
        touched = Accesses(ranges(reads), ranges(writes))
        self.note(cast(RecordingStream, stream), "declare", touched, what)

    def host_access(self, *, reads: Touched = (), writes: Touched = (), what: str) -> None:
        """Say what the host itself touches now."""
        self._collect()
        self._host_version += 1
        self._touch(_HOST, self._host, Accesses(ranges(reads), ranges(writes)), Operation("host", what, _site()))

    # What streams and events use.

    def host_saw(self, clock: Mapping[int, int]) -> None:
        """Order what the host does from here on after what has this clock."""
        if join(self._host, clock):
            self._host_version += 1

    def note(self, stream: RecordingStream, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Take in a call that the wrapped stream has accepted."""
        note = Note(method, args, kwargs, _site())
        if self._capturing is None:
            self._apply(stream, note)
        else:
            if method == "copy":
                self._watch(*args)
            self._capturing.append(note)

    def note_replay(self, stream: RecordingStream, graph: RecordingGraph) -> None:
        """Take in everything that a graph captured."""
        replayed = f", replayed at {_site()}"
        for note in graph.notes:
            self._apply(stream, note._replace(site=note.site + replayed))

    def _apply(self, stream: RecordingStream, note: Note) -> None:
        self._collect()
        clock = stream.clock
        if stream.host_version != self._host_version:
            stream.host_version = self._host_version
            join(clock, self._host)
        what, twice = note.method, None
        match note:
            case Note(method="record", args=(event,)):
                event.clock = dict(clock)
                return
            case Note(method="wait", args=(event,)):
                join(clock, event.clock)
                if isinstance(self.inner, CpuDevice) and stream.inner is self.inner.compute():
                    self.host_saw(clock)
                return
            case Note(method="copy", args=(dst, src)):
                self._watch(dst, src)
                self.tables.copied(dst, src)
                touched = copy_accesses(dst, src)
            case Note(method="copy_batch", args=(batch,)):
                touched, twice = batch_accesses(batch), overlaps(batch)
            case Note(method="launch", args=(kernel, *args)):
                what = f"launch of {getattr(kernel, '__name__', kernel)}"
                accesses = declared(kernel, self._accesses)
                if accesses is None:
                    self.undeclared.add(getattr(kernel, "__qualname__", str(kernel)))
                    return
                touched = accesses(self.tables.ids, *args, **note.kwargs)
            case _:
                touched, what = note.args
        self._touch(stream.number, clock, touched, Operation(stream.name, what, note.site), twice)

    def _touch(
        self, stream: int, clock: Clock, touched: Accesses, operation: Operation, twice: Ranges | None = None
    ) -> None:
        """Note what an operation touches; `twice` is what it writes and touches again in no fixed order."""
        clock[stream] = clock.get(stream, 0) + 1
        access = Access(stream, clock[stream], operation)
        read = self._shadow.read(touched.reads, access, clock)
        written = self._shadow.write(touched.writes, access, clock)
        written += [Conflict(access, True, start, end) for start, end in ([] if twice is None else twice.tolist())]
        for race in (
            *races_of(read, operation, wrote=False, labels=self._labels),
            *races_of(written, operation, wrote=True, labels=self._labels),
        ):
            if len(self.races) < MAX_RACES:
                self.races.append(race)
            if self._raise:
                raise RaceError(str(race))

    def _wrapped(self, inner: Stream) -> RecordingStream:
        # The CUDA device makes an object for the compute stream each time; what it stands for stays.
        key = getattr(inner, "raw", inner)
        if key not in self._streams:
            self._streams[key] = RecordingStream(inner, len(self._streams) + 1, self)
        return self._streams[key]

    def _watch(self, *tensors: torch.Tensor, new: bool = False) -> None:
        """Forget a tensor's bytes once its storage is dropped: what then lies there is other memory.

        Args:
            tensors: any; their storages are looked at.
            new: the device has just made the memory, and orders its uses before what had it earlier.
        """
        self._collect()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if start not in self._watched and start != end:
                self._watched.add(start)
                weakref.finalize(storage, self._freed.append, (start, end)).atexit = False
            if new and start != end:
                self._shadow.forget(start, end)

    def _collect(self) -> None:
        while self._freed:
            start, end = self._freed.popleft()
            self._watched.discard(start)
            self._shadow.forget(start, end)
            self._labels.forget(start, end)


def _site() -> str:
    """The innermost caller outside this package: file:line."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
