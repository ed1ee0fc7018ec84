"""A stand-in for the part of `torch.cuda` and of the CUDA driver that `CudaDevice` uses, on CPU tensors and in virtual
time.

Inside `with FakeCuda() as api:` a `copy_(non_blocking=True)` is queued on the current fake stream, "cuda" tensors are
made on the CPU, the loaded driver is `api.driver`, and nothing queued runs until the test says which stream goes next.
As in CUDA, waiting for an event that was never recorded does nothing. Kernels are queued if they are wrapped by
`kernel`. While a graph is captured, what its stream is given becomes part of the graph, and everything else is an
error that ends the capture.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from layerstream.streams.driver import MemcpyAttributes

WORK_S = 1e-3
"""Virtual seconds that a copy or a kernel takes on its stream, unless the fake is told otherwise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call that reached the fake, in the order of the calls."""

    call: str
    """record, wait, copy, copy_batch, launch, replay, wait_value, write_value or record_stream."""
    stream: int
    what: Any = None
    """The event's number, the bytes of a copy, the rows of a batch, the kernel's name, the (address, value)."""


class _Point:
    """One recording of an event."""

    def __init__(self) -> None:
        self.reached_at: float | None = None


class Operation(NamedTuple):
    """Something queued. `now`, called once when a graph that has it is launched, gives what is queued then."""

    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    now: Callable[[FakeStream], Operation] | None = None


class FakeStream:
    """A queue of operations that run only when the fake is told to. `clock` is its own virtual time in seconds."""

    def __init__(self, api: FakeCuda, number: int, priority: int) -> None:
        self.number = number
        self.priority = priority
        self.clock = 0.0
        self.pending: deque[Operation] = deque()
        self._api = api

    @property
    def cuda_stream(self) -> int:
        """The handle: 0 is CUDA's default stream."""
        return self.number * 0x1000

    def wait_event(self, event: FakeEvent) -> None:
        self._api.log.append(Entry("wait", self.number, event.number))
        if not event.created:
            return
        self.push(event.waited(self), external=event.external)

    def query(self) -> bool:
        self._api.check()
        if self._api.capturing is not None and self._api.capturing.stream is self:
            self._api.capturing.spoil("cudaStreamQuery of a capturing stream")
        return not self.pending

    def synchronize(self) -> None:
        raise AssertionError("the host may not wait for a stream")

    def runnable(self) -> bool:
        """Whether the oldest operation could run now."""
        return bool(self.pending) and self.pending[0].ready()

    def push(self, operation: Operation, *, external: bool = True) -> None:
        """Queue an operation, or make it part of the graph that is being captured."""
        graph = self._api.capturing
        if graph is None:
            self.pending.append(operation.now(self) if operation.now else operation)
            return
        if graph.stream is not self:
            graph.spoil("an operation on a stream that is not capturing")
        if not external:
            graph.spoil("an event of another capture, or of none")
        graph.nodes.append(operation)

    def work(self, operation: Callable[[], object]) -> None:
        """Queue a copy or a kernel."""

        def at(stream: FakeStream) -> Operation:
            def run() -> None:
                operation()
                stream.clock += stream._api.work_s

            return Operation(run)

        self.push(Operation(operation, now=at))

    def reach(self, point: _Point) -> None:
        """Go on after a point that was reached."""
        assert point.reached_at is not None
        self.clock = max(self.clock, point.reached_at)


class FakeEvent:
    """As `torch.cuda.Event`: its latest recording counts, and without one it is done."""

    def __init__(self, api: FakeCuda, number: int, enable_timing: bool, external: bool) -> None:
        self.number = number
        self.point: _Point | None = None
        self.external = external
        self.created = False
        """torch makes the event when it is first recorded, also in a capture; a wait before that does nothing."""
        self._api = api
        self._timing = enable_timing

    def record(self, stream: FakeStream) -> None:
        self._api.log.append(Entry("record", stream.number, self.number))
        self.created = True

        def at(stream: FakeStream) -> Operation:
            self.point = point = _Point()

            def reach() -> None:
                point.reached_at = stream.clock

            return Operation(reach)

        stream.push(Operation(lambda: None, now=at), external=self.external)

    def waited(self, stream: FakeStream) -> Operation:
        """A wait for what is recorded now; in a graph, as `FakeCuda.graph_waits` says."""
        live = self._api.capturing is not None and self._api.graph_waits == "live"

        def at(stream: FakeStream) -> Operation:
            seen = self.point

            def point() -> _Point | None:
                return self.point if live else seen

            def run() -> None:
                reached = point()
                if reached is not None:
                    stream.reach(reached)

            def ready() -> bool:
                awaited = point()
                return awaited is None or awaited.reached_at is not None

            return Operation(run, ready)

        return Operation(lambda: None, now=at)

    def query(self) -> bool:
        self._api.check()
        return self.point is None or self.point.reached_at is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, as in torch."""
        assert self._timing and end._timing, "both events need enable_timing"
        assert self.point and end.point and self.point.reached_at is not None and end.point.reached_at is not None
        return (end.point.reached_at - self.point.reached_at) * 1e3

    def synchronize(self) -> None:
        raise AssertionError("the host may not wait for an event")


class FakeGraph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, api: FakeCuda) -> None:
        self.nodes: list[Operation] = []
        self.stream: FakeStream | None = None
        self._api = api
        self._spoilt: str | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        stream = self._api.current_stream()
        if stream.number == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if self._api.capturing is not None:
            raise RuntimeError("a capture is under way")
        self.stream, self._api.capturing = stream, self
        self._api.capture_modes.append(capture_error_mode)

    def capture_end(self) -> None:
        self._api.capturing = None
        if self._spoilt is not None:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture ({self._spoilt})")

    def spoil(self, why: str) -> None:
        """End the capture, as the first error in it does."""
        self._spoilt = why
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({why})")

    def replay(self) -> None:
        stream = self._api.current_stream()
        self._api.log.append(Entry("replay", stream.number))
        assert self._api.capturing is None, "graphs are not replayed inside a capture"
        for node in self.nodes:
            stream.push(node)


class FakeCuda:
    """The module. `log` has every call; `run` lets queued operations happen."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.streams: list[FakeStream] = []
        self.broken = False
        """Whether the context is: queries raise."""
        self.work_s = WORK_S
        self.pinned_bytes: list[int] = []
        """Sizes of the pinned tensors that were made."""
        self.capturing: FakeGraph | None = None
        """What is being captured."""
        self.graph_waits: Literal["launch", "live"] = "launch"
        """What a captured wait waits for: what is recorded when its graph is launched, or when the wait is reached."""
        self.capture_modes: list[str] = []
        self.driver = FakeDriver(self)
        self._events = 0
        self._current = self.Stream()
        self._patches = ExitStack()

    # What CudaDevice calls, named as in torch.cuda.

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> FakeStream:  # noqa: N802
        stream = FakeStream(self, len(self.streams), priority)
        self.streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False, external: bool = False) -> FakeEvent:  # noqa: N802
        self._events += 1
        return FakeEvent(self, self._events, enable_timing, external)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing is not None and self.capturing.stream is self._current

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous

    def __enter__(self) -> Self:
        self._patches.enter_context(_Intercept(self))
        # By hand, as torch checks the type of the stream before it asks the mode.
        self._patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", self._record_stream))
        self._patches.enter_context(
            mock.patch("layerstream.streams.driver.loaded_driver", side_effect=lambda **_: self.driver)
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """What `dst.copy_(src, non_blocking=True)` does inside the fake."""
        self.log.append(Entry("copy", self._current.number, dst.nbytes))
        self._current.work(lambda: dst.copy_(src))

    def _record_stream(self, stream: FakeStream) -> None:
        self.log.append(Entry("record_stream", stream.number))

    # What tests call.

    def kernel(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function` as a kernel: calling it queues it on the current stream."""

        @functools.wraps(function)
        def launch(*args: Any, **kwargs: Any) -> None:
            self.log.append(Entry("launch", self._current.number, function.__name__))
            self._current.work(lambda: function(*args, **kwargs))

        return launch

    def hold(self) -> Callable[[], None]:
        """Queue a wait on the current stream that only the returned function ends."""
        stream, point = self._current, _Point()
        stream.push(Operation(lambda: None, lambda: point.reached_at is not None))

        def release() -> None:
            point.reached_at = stream.clock

        return release

    def check(self) -> None:
        """Raise what torch raises from a broken context."""
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def run(self, choose: Callable[[list[FakeStream]], FakeStream] = lambda ready: ready[0]) -> None:
        """Run operations one by one until none can; `choose` picks the stream of the next one."""
        while ready := [stream for stream in self.streams if stream.runnable()]:
            choose(ready).pending.popleft().run()


class _Intercept(TorchFunctionMode):
    """Gives a fake what torch's own functions would give CUDA."""

    def __init__(self, api: FakeCuda) -> None:
        super().__init__()
        self._api = api

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            dst, src = args
            self._api.copy(dst, src)
            return dst
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self._api.pinned_bytes.append(result.nbytes)
        return result


class FakeDriver:
    """The CUDA driver's functions, by their exported names, on a fake's streams. `refuse` says what they answer.

    A wait for a value goes on once the int32 at its address, which is the CPU's here, has it.
    """

    NAMES: ClassVar[dict[int, bytes]] = {1: b"CUDA_ERROR_INVALID_VALUE", 801: b"CUDA_ERROR_NOT_SUPPORTED"}

    def __init__(self, api: FakeCuda) -> None:
        self.refuse: dict[str, int] = {}
        """Function -> error number."""
        self.attributes: list[Any] = []
        """The attributes of every batch."""
        self._api = api

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        if code in self.NAMES:
            name._obj.value = self.NAMES[code]
            return 0
        return 1

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        return self._copy("cuMemcpyAsync", stream, [(target, source, nbytes)], Entry("copy", stream // 0x1000, nbytes))

    def cuMemcpyBatchAsync_v2(  # noqa: N802
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, starts: int, kinds: int, stream: int
    ) -> int:
        if stream in (0, 1) or kinds != 1 or ctypes.c_size_t.from_address(starts).value != 0 or count < 1:
            return 1
        self.attributes.append(MemcpyAttributes.from_buffer_copy(MemcpyAttributes.from_address(attributes)))
        columns = [(ctypes.c_uint64 * count).from_address(address)[:] for address in (targets, sources, sizes)]
        rows = list(zip(*columns, strict=True))
        return self._copy("cuMemcpyBatchAsync_v2", stream, rows, Entry("copy_batch", stream // 0x1000, count))

    def cuStreamWaitValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:  # noqa: N802
        if code := self.refuse.get("cuStreamWaitValue32_v2", 0 if flags == 1 else 1):
            return code
        self._api.log.append(Entry("wait_value", stream // 0x1000, (address, value)))
        word = ctypes.c_uint32.from_address(address)
        self._stream(stream).push(Operation(lambda: None, lambda: word.value == value))
        return 0

    def cuStreamWriteValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:  # noqa: N802
        if code := self.refuse.get("cuStreamWriteValue32_v2", 0):
            return code
        self._api.log.append(Entry("write_value", stream // 0x1000, (address, value)))
        word = ctypes.c_uint32.from_address(address)
        self._stream(stream).push(Operation(lambda: setattr(word, "value", value)))
        return 0

    def _copy(self, function: str, stream: int, rows: list[tuple[int, int, int]], entry: Entry) -> int:
        if code := self.refuse.get(function, 0):
            return code
        if any(nbytes == 0 for _, _, nbytes in rows):
            return 1
        self._api.log.append(entry)

        def move() -> None:
            for target, source, nbytes in rows:
                ctypes.memmove(target, source, nbytes)

        self._stream(stream).work(move)
        return 0

    def _stream(self, handle: int) -> FakeStream:
        return next(stream for stream in self._api.streams if stream.cuda_stream == handle)


class OldFakeDriver(FakeDriver):
    """A driver of CUDA 12.8, whose batch copy has one argument more."""

    cuMemcpyBatchAsync_v2 = None  # type: ignore[assignment]  # noqa: N815

    def cuMemcpyBatchAsync(self, *args: int) -> int:  # noqa: N802
        targets, sources, sizes, count, attributes, starts, kinds, failed_row, stream = args
        ctypes.c_size_t.from_address(failed_row).value = 0
        return FakeDriver.cuMemcpyBatchAsync_v2(self, targets, sources, sizes, count, attributes, starts, kinds, stream)


class FakeRuntime:
    """The CUDA runtime's host registration: refuses from the `refuse_from`-th call on, and keeps its last error."""

    OUT_OF_MEMORY: ClassVar[int] = 2

    def __init__(self, *, refuse_from: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.last_error = 0
        self.device = 0
        """The calling thread's."""
        self._refuse_from = refuse_from

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.device = index
        return 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, nbytes))
        if self._refuse_from is not None and len(self.calls) >= self._refuse_from:
            self.last_error = self.OUT_OF_MEMORY
            return self.OUT_OF_MEMORY
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.registered:
            self.last_error = 1
            return 1
        del self.registered[address]
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        code, self.last_error = self.last_error, 0
        return code
