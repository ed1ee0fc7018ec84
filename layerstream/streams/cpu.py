"""The CPU device: a stream is one thread that runs its queue in order, so overlap is real where a core is free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from layerstream.streams.base import Event, Graph, Stream
from layerstream.streams.capture import Capture, check_timing
from layerstream.streams.cpu_streams import CallingThread, CpuEvent, CpuStream

HANG_S = 60.0
"""Seconds after which a compute stream stops believing that what it waits for will come."""
ALIGNMENT = 256
"""Of device memory, as CUDA allocations have it."""


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
        self._capture = Capture()
        self._compute = CallingThread(hang_s, self._capture)
        self._streams: list[CpuStream] = []

    def compute(self) -> Stream:
        """See `Device.compute`: the calling thread itself."""
        return self._compute

    def stream(self, name: str, *, priority: int) -> Stream:
        """See `Device.stream`. Threads have no priority that an unprivileged process could raise again."""
        stream = CpuStream(name, self._cores, self._capture)
        self._streams.append(stream)
        return stream

    def event(self, *, in_graph: bool = False) -> Event:
        """See `Device.event`."""
        if in_graph:
            self._capture.refuse("an event for graphs made")
        return CpuEvent(in_graph=in_graph)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """See `Device.capture`. The graph is the list of calls; any stream of the device can replay it."""
        return self._capture.run(stream, stream.name, queue)

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`.

        Raises:
            TransferError: one of the events is not done or has no timing, or what it follows failed.
        """
        check_timing(start, end)
        return cast(CpuEvent, end).point().stamp - cast(CpuEvent, start).point().stamp

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        self._capture.refuse("device memory made")
        memory = torch.empty(nbytes + ALIGNMENT - 1, dtype=torch.uint8)
        return memory.narrow(0, -memory.data_ptr() % ALIGNMENT, nbytes)

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """See `Device.table`. Queued kernels keep the table they were given."""
        self._capture.refuse("a table made")
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
