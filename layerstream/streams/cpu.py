"""The CPU device: a stream is one thread that runs its queue in order, so overlap is real where a core is free.

Copies are numpy's: `copyto` releases the GIL for the length of the copy and stays on its thread, where torch's own
copy would start a second team of intra-op threads beside the model's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from layerstream.errors import TransferError, TransferTimeout
from layerstream.streams.base import Event, Stream

logger = logging.getLogger(__name__)

HANG_S = 60.0
"""Seconds after which a compute stream stops believing that what it waits for will come."""
ALIGNMENT = 256
"""Of device memory, as CUDA allocations have it."""


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

    __slots__ = ("_point",)

    def __init__(self) -> None:
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

    def __init__(self, name: str, cores: Sequence[int] | None) -> None:
        self.name = name
        self._cores = cores
        self._failure: TransferError | None = None
        self._closed = False
        # Unlike queue.Queue it is C: a put costs well under a microsecond and a busy reader never sleeps.
        self._queue: SimpleQueue[_Work | _Point | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        point = _Point()
        self._put(point)
        cast(CpuEvent, event).set(point)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        point = cast(CpuEvent, event).point()
        if not point.passed or point.error is not None:
            self._put((_pass, (point,), {}))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        self._put((np.copyto, _same_size(self.name, dst, src), {}))

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


class _CallingThread:
    """The compute stream: the model runs on the calling thread, so everything happens at once, in the caller's time."""

    name = "compute"

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s

    def record(self, event: Event) -> None:
        """See `Stream.record`. The point is already reached."""
        point = _Point()
        point.open(None)
        cast(CpuEvent, event).set(point)

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

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        np.copyto(*_same_size(self.name, dst, src))

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. An error of the kernel is the caller's."""
        kernel(*args, **kwargs)


class CpuDevice:
    """See `layerstream.streams.base.Device`."""

    kind = "cpu"

    def __init__(self, cores: Sequence[int] | None = None, *, hang_s: float = HANG_S) -> None:
        """
        Args:
            cores: where stream threads run; None leaves them on the cores of the thread that makes them, which in a
                vLLM worker is the one core its model thread is bound to (see `spare_cores`).
            hang_s: seconds the compute stream waits for an event before it gives up.
        """
        self._cores = None if cores is None else tuple(cores)
        self._compute = _CallingThread(hang_s)
        self._streams: list[CpuStream] = []

    def compute(self) -> Stream:
        """See `Device.compute`: the calling thread itself."""
        return self._compute

    def stream(self, name: str, *, priority: int) -> Stream:
        """See `Device.stream`. Threads have no priority that an unprivileged process could raise again."""
        stream = CpuStream(name, self._cores)
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        """See `Device.event`."""
        return CpuEvent()

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`.

        Raises:
            TransferError: one of the events is not done, or what it follows failed.
        """
        if not (start.done() and end.done()):
            raise TransferError("time was asked between events of which one is not done; ask done() first")
        return cast(CpuEvent, end).point().stamp - cast(CpuEvent, start).point().stamp

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        memory = torch.empty(nbytes + ALIGNMENT - 1, dtype=torch.uint8)
        return memory.narrow(0, -memory.data_ptr() % ALIGNMENT, nbytes)

    def table(self, values: Sequence[int]) -> torch.Tensor:
        """See `Device.table`. Queued kernels keep the table they were given."""
        return torch.from_numpy(np.array(values, dtype=np.int32))

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`. A stuck thread is a daemon: it does not keep the interpreter from ending."""
        deadline = time.monotonic() + timeout_s
        for stream in self._streams:
            stream.close()
        return all(stream.join(deadline - time.monotonic()) for stream in self._streams)


def spare_cores() -> list[int] | None:
    """Cores that this process may use and its model threads do not; None if there are none.

    Those are the cores the kernel would grant (its cpuset) beyond the calling thread's, and of them, where any are
    left, the ones to which no other thread of the process is bound alone, as OpenMP threads of a CPU worker are.
    """
    granted: set[int] = set()

    def ask() -> None:
        # A thread of its own, as the affinity asked for becomes the affinity of whoever asks.
        try:
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        except OSError:
            return
        granted.update(os.sched_getaffinity(0))

    asker = threading.Thread(target=ask, name="layerstream-cores")
    asker.start()
    asker.join()
    spare = granted - os.sched_getaffinity(0)
    bound: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            cores = os.sched_getaffinity(int(task.name))
            bound |= cores if len(cores) == 1 else set()
    return sorted(spare - bound or spare) or None


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


def _same_size(stream: str, dst: torch.Tensor, src: torch.Tensor) -> tuple[Any, Any]:
    """Both buffers as arrays. numpy would spread a shorter source over the destination."""
    if dst.numel() != src.numel():
        raise TransferError(
            f"copy on stream {stream!r}: {src.numel()} bytes into {dst.numel()}; both sides must be equally long"
        )
    return dst.numpy(), src.numpy()


def _following(cause: BaseException, message: str | None = None) -> TransferError:
    """Make a fresh error chained to `cause`: one object raised by several askers would mix their tracebacks."""
    error = TransferError(message or str(cause))
    error.__cause__ = cause
    return error
