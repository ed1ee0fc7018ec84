"""A device without hardware, for tests and for planning: real bytes, virtual time, and any order that events allow.

Everything is queued, on the compute stream too, and runs only when `VirtualDevice.run` is called: one operation at a
time, by default in the order in which hardware with the given `Costs` would start them. An order chosen at random among
what the events allow (`run(choose=random.Random(seed).choice)`) turns a missing event into wrong bytes.

Time is counted, never measured. The host has a clock, which every submission moves on. An operation starts once it was
submitted, its stream is free, the events it waits for are reached, and, for a copy, the copy engine of its direction is
free. Kernels and the model's work share no engine: what they cost each other is not counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from layerstream.errors import TransferError
from layerstream.streams.accesses import AccessFunction, declared
from layerstream.streams.base import Event, Graph, Stream
from layerstream.streams.capture import Capture, check_timing
from layerstream.streams.costs import Costs
from layerstream.streams.tables import TableCopies
from layerstream.streams.virtual_streams import Engine, Operation, Point, VirtualEvent, VirtualStream

if TYPE_CHECKING:
    import numpy.typing as npt

ALIGNMENT = 256
"""Of device memory, as CUDA allocations have it."""
UNINITIALISED = 0xA5
"""What every byte of memory holds before anything was written to it."""
NO_IDS = -(1 << 30)
"""What a table holds before it was written: no page of any cache."""


class VirtualDevice:
    """See `layerstream.streams.base.Device`."""

    kind = "cpu"
    """Its memory is the CPU's, and so are its kernels."""

    def __init__(
        self, costs: Costs | None = None, *, accesses: Mapping[Callable[..., None], AccessFunction] | None = None
    ) -> None:
        """
        Args:
            costs: what work costs; None for the defaults.
            accesses: what kernels touch, which tells what they cost (`layerstream.streams.accesses`).
        """
        self.costs = costs or Costs()
        self.host_clock = 0.0
        """Virtual time of the host in seconds. Add to it for what the host does between submissions."""
        self.tables = TableCopies()
        """What tables hold, for `accesses`."""
        self._accesses = accesses or {}
        self._capture = Capture()
        self._compute = VirtualStream("compute", self, self._capture)
        self._streams = [self._compute]
        self._engine_free: dict[Engine, float] = {"to device": 0.0, "to host": 0.0}
        self._submitted = 0
        self._replaying = False
        self._starts: list[int] = []
        self._memory: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def compute(self) -> Stream:
        """See `Device.compute`: a queue like any other."""
        return self._compute

    def stream(self, name: str, *, priority: int) -> Stream:
        """See `Device.stream`. Priorities change nothing, since kernels share no engine."""
        stream = VirtualStream(name, self, self._capture)
        self._streams.append(stream)
        return stream

    def event(self, *, in_graph: bool = False) -> Event:
        """See `Device.event`."""
        if in_graph:
            self._capture.refuse("an event for graphs made")
        return VirtualEvent(in_graph=in_graph)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """See `Device.capture`. The graph is the list of calls."""
        return self._capture.run(stream, stream.name, queue)

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`, in virtual time.

        Raises:
            TransferError: one of the events is not done or has no timing.
        """
        check_timing(start, end)
        return self.reached_at(end) - self.reached_at(start)

    def reached_at(self, event: Event) -> float:
        """Virtual time in seconds at which an event that is done was reached.

        Raises:
            TransferError: it is not done.
        """
        reached = cast(VirtualEvent, event).point().reached_at
        if reached is None:
            raise TransferError("the time of an event was asked that is not done; run the device first")
        return reached

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        self._capture.refuse("device memory made")
        memory = torch.full((nbytes + ALIGNMENT - 1,), UNINITIALISED, dtype=torch.uint8)
        self.place(memory)
        return memory.narrow(0, -memory.data_ptr() % ALIGNMENT, nbytes)

    def place(self, tensor: torch.Tensor) -> None:
        """Count a tensor's whole storage as device memory, and keep it: a model's KV cache, for one."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self._memory:
            bisect.insort(self._starts, start)
        self._memory[start] = (start + storage.nbytes(), storage)

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """See `Device.table`. Written by the compute stream, when it comes to that."""
        self._capture.refuse("a table made")
        host = torch.from_numpy(np.array(values, dtype=np.int32))
        table = torch.full_like(host, NO_IDS)
        self.tables.set(table, values)
        self.submit(self._compute, self.costs.launch_s, 0.0, lambda: np.copyto(table.numpy(), host.numpy()))
        return table

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`. Runs what can run; False if something waits for what will not come."""
        self.run()
        return not any(stream.pending for stream in self._streams)

    def work(self, stream: Stream, seconds: float, operation: Callable[[], object] | None = None) -> None:
        """Queue the model's work: `operation`, if any, taking `seconds` of virtual time."""
        cast(VirtualStream, stream).work(seconds, operation)

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Queue a wait on `stream` that only the returned function ends, at the host's time."""
        point = Point()
        self.submit(cast(VirtualStream, stream), 0.0, awaited=point)

        def release() -> None:
            point.reached_at = self.host_clock

        return release

    def run(
        self,
        choose: Callable[[list[VirtualStream]], VirtualStream] | None = None,
        *,
        until: float | None = None,
    ) -> None:
        """Run queued operations one by one until none can run. An error of an operation is the caller's.

        Args:
            choose: picks, among the streams whose oldest operation can run, the one that goes next. None: the one
                whose operation starts first, and of those the one that was ready first.
            until: run nothing that starts later, in virtual seconds; None for no limit.
        """
        while ready := [stream for stream in self._streams if self._can_run(stream, until)]:
            self._run_next((choose or self._earliest)(ready))

    # What streams use.

    def submit(
        self,
        stream: VirtualStream,
        host_s: float,
        seconds: float = 0.0,
        run: Callable[[], object] | None = None,
        engine: Engine | None = None,
        *,
        awaited: Point | None = None,
        recorded: Point | None = None,
    ) -> None:
        """Queue an operation that costs the host `host_s` and its stream `seconds`."""
        if not self._replaying:
            self.host_clock += host_s
        self._submitted += 1
        stream.pending.append(Operation(self._submitted, self.host_clock, seconds, run, engine, awaited, recorded))

    @contextmanager
    def one_submission(self) -> Iterator[None]:
        """Let everything that is queued meanwhile cost the host one launch."""
        self.host_clock += self.costs.launch_s
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False

    def engine(self, target: int, source: int) -> Engine | None:
        """The copy engine between two addresses; None within one memory."""
        to_device, from_device = self._on_device(target), self._on_device(source)
        if to_device == from_device:
            return None
        return "to device" if to_device else "to host"

    def kernel_seconds(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """What a kernel with these arguments takes."""
        accesses = declared(kernel, self._accesses)
        if accesses is None:
            return 0.0
        nbytes = accesses(self.tables.ids, *args, **kwargs).nbytes
        return self.costs.kernel_latency_s + nbytes / self.costs.kernel_bytes_per_s

    def _on_device(self, address: int) -> bool:
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._memory[self._starts[place]][0]

    def _can_run(self, stream: VirtualStream, until: float | None) -> bool:
        if not stream.pending:
            return False
        awaited = stream.pending[0].awaited
        if awaited is not None and awaited.reached_at is None:
            return False
        return until is None or self._start(stream)[0] <= until

    def _start(self, stream: VirtualStream) -> tuple[float, float, int]:
        """When a stream's oldest operation starts, when it would with a free engine, and its number."""
        operation = stream.pending[0]
        ready = max(stream.clock, operation.submitted_at)
        if operation.awaited is not None and operation.awaited.reached_at is not None:
            ready = max(ready, operation.awaited.reached_at)
        start = ready if operation.engine is None else max(ready, self._engine_free[operation.engine])
        return start, ready, operation.number

    def _earliest(self, ready: list[VirtualStream]) -> VirtualStream:
        return min(ready, key=self._start)

    def _run_next(self, stream: VirtualStream) -> None:
        start, _, _ = self._start(stream)
        operation = stream.pending.popleft()
        if operation.run is not None:
            operation.run()
        stream.clock = start + operation.seconds
        if operation.engine is not None:
            self._engine_free[operation.engine] = stream.clock
        if operation.recorded is not None:
            operation.recorded.reached_at = stream.clock
