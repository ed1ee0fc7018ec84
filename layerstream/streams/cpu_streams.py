"""Streams and events of the CPU device: threads and gates.

Copies are numpy's: `copyto` releases the GIL for the length of the copy and stays on its thread, where torch's own
copy would start a second team of intra-op threads beside the model's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from layerstream.errors import TransferError, TransferTimeout
from layerstream.streams.base import CopyBatch, Event, Graph, Stream
from layerstream.streams.capture import CallGraph, Capture, capturable
from layerstream.streams.copies import check_batch, check_copy, kept, move_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Point:
    """One recording of an event: a gate that opens once, with the time or with an error."""

    __slots__ = ("_gate", "error", "passed", "stamp")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.passed = False
        self.stamp = 0.0
        self.error: TransferError | None = None

    def open(self, error: TransferError | None) -> None:
        self.stamp = time.perf_counter()
        self.error = error
        self.passed = True
        self._gate.release()

    def block(self, timeout_s: float = -1.0) -> bool:
        """Wait until it opens; False if that took longer than `timeout_s` (negative: no limit)."""
        if not self.passed:
            if not self._gate.acquire(timeout=timeout_s):
                return False
            self._gate.release()
        return True


class CpuEvent:
    """See `layerstream.streams.base.Event`. A wait keeps the point it saw; recording again makes another."""

    __slots__ = ("_point", "in_graph")

    def __init__(self, *, in_graph: bool = False) -> None:
        self.in_graph = in_graph
        self._point: _Point | None = None

    def point(self) -> _Point:
        """The latest recording.

        Raises:
            TransferError: never recorded.
        """
        if self._point is None:
            raise TransferError("an event was used before it was recorded on any stream; record it first")
        return self._point

    def set(self, point: _Point) -> None:
        """Make `point` the latest recording."""
        self._point = point

    def done(self) -> bool:
        """See `Event.done`.

        Raises:
            TransferError: an operation before the point failed, or the event was never recorded.
        """
        point = self.point()
        if point.error is not None:
            raise _following(point.error)
        return point.passed


_Work: TypeAlias = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]


class CpuStream:
    """A queue and the daemon thread that runs it.

    After a failed operation it runs nothing more, as what follows would work on wrong bytes; every event recorded from
    then on carries the failure.
    """

    def __init__(self, name: str, cores: Sequence[int] | None, capture: Capture) -> None:
        self.name = name
        self._capture = capture
        self._cores = cores
        self._failure: TransferError | None = None
        self._closed = False
        # Unlike queue.Queue it is C: a put costs well under a microsecond and a busy reader never sleeps.
        self._queue: SimpleQueue[_Work | _Point | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @capturable
    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        point = _Point()
        self._put(point)
        cast(CpuEvent, event).set(point)

    @capturable
    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        point = cast(CpuEvent, event).point()
        if not point.passed or point.error is not None:
            self._put((_pass, (point,), {}))

    @capturable
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        check_copy(self.name, dst, src)
        self._put((np.copyto, (dst.numpy(), src.numpy()), {}))

    @capturable
    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`."""
        check_batch(self.name, batch)
        self._put((move_rows, (kept(batch),), {}))

    @capturable
    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`."""
        _replay(self, graph)

    @capturable
    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. The kernel runs on the stream's thread; it should release the GIL while it works."""
        self._put((kernel, args, kwargs))

    def close(self) -> None:
        """Take nothing more, and end the thread after what is queued."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, waiting up to `timeout_s` for it."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _put(self, item: _Work | _Point) -> None:
        if self._closed:
            raise TransferError(f"stream {self.name!r} is closed; nothing can be queued on it")
        self._queue.put(item)

    def _run(self) -> None:
        if self._cores:
            try:
                os.sched_setaffinity(0, self._cores)
            except OSError as error:
                logger.warning("Stream %r stays on inherited cores: %s refused (%s)", self.name, self._cores, error)
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Point):
                item.open(self._failure)
            elif self._failure is None:
                self._failure = _attempt(self.name, *item)
            # The next item may be long in coming; until then nothing may keep this one's memory alive.
            del item


class CallingThread:
    """The compute stream: the model runs on the calling thread, so everything happens at once, in the caller's time."""

    name = "compute"

    def __init__(self, hang_s: float, capture: Capture) -> None:
        self._hang_s = hang_s
        self._capture = capture

    @capturable
    def record(self, event: Event) -> None:
        """See `Stream.record`. The point is already reached."""
        point = _Point()
        point.open(None)
        cast(CpuEvent, event).set(point)

    @capturable
    def wait(self, event: Event) -> None:
        """See `Stream.wait`. Blocks the caller until the event's point.

        Raises:
            TransferError: an operation before the point failed, or the event was never recorded.
            TransferTimeout: the point was not reached in time.
        """
        point = cast(CpuEvent, event).point()
        if not point.block(self._hang_s):
            raise TransferTimeout(
                f"stream {self.name!r} waited {self._hang_s:g} s for an event that did not come; a transfer hangs"
            )
        if point.error is not None:
            raise _following(point.error)

    @capturable
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        check_copy(self.name, dst, src)
        np.copyto(dst.numpy(), src.numpy())

    @capturable
    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`. Done at once."""
        check_batch(self.name, batch)
        move_rows(batch)

    @capturable
    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`. Done at once."""
        _replay(self, graph)

    @capturable
    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. An error of the kernel is the caller's."""
        kernel(*args, **kwargs)


def _attempt(
    stream: str, work: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TransferError | None:
    """Run one queued operation; what went wrong, if anything did."""
    try:
        work(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is handed to whoever waits for it
        return _following(error, f"an operation failed on stream {stream!r}: {error}")
    return None


def _pass(point: _Point) -> None:
    """Keep a stream thread behind `point`; a failure before it becomes the stream's own."""
    point.block()
    if point.error is not None:
        raise _following(point.error)


def _replay(stream: Stream, graph: Graph) -> None:
    """Make the calls of a graph again on `stream`."""
    calls = cast(CallGraph, graph)
    for event in calls.waits:
        cast(CpuEvent, event).point()
    for method, args, kwargs in calls.calls:
        getattr(stream, method)(*args, **kwargs)


def _following(cause: BaseException, message: str | None = None) -> TransferError:
    """Make a fresh error chained to `cause`: one object raised by several askers would mix their tracebacks."""
    error = TransferError(message or str(cause))
    error.__cause__ = cause
    return error
