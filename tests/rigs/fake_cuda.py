"""A stand-in for the part of `torch.cuda` that `CudaDevice` uses, on CPU tensors and in virtual time.

Inside `with FakeCuda() as api:` a `copy_(non_blocking=True)` is queued on the current fake stream, "cuda" tensors are
made on the CPU, and nothing queued runs until the test says which stream goes next. As in CUDA, waiting for an event
that was never recorded does nothing. Kernels are queued if they are wrapped by `kernel`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

WORK_S = 1e-3
"""Virtual seconds that a copy or a kernel takes on its stream, unless the fake is told otherwise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call that reached the fake, in the order of the calls."""

    call: str
    """record, wait, copy, launch or record_stream."""
    stream: int
    what: Any = None
    """The event's number, the bytes of a copy, the kernel's name."""


class _Point:
    """One recording of an event."""

    def __init__(self) -> None:
        self.reached_at: float | None = None


class FakeStream:
    """A queue of operations that run only when the fake is told to. `clock` is its own virtual time in seconds."""

    def __init__(self, api: FakeCuda, number: int, priority: int) -> None:
        self.number = number
        self.priority = priority
        self.clock = 0.0
        self.pending: deque[tuple[_Point | None, Callable[[], None]]] = deque()
        self._api = api

    def wait_event(self, event: FakeEvent) -> None:
        self._api.log.append(Entry("wait", self.number, event.number))
        point = event.point
        if point is not None:
            self.pending.append((point, lambda: self._advance_to(point)))

    def query(self) -> bool:
        self._api.check()
        return not self.pending

    def synchronize(self) -> None:
        raise AssertionError("the host may not wait for a stream")

    def runnable(self) -> bool:
        """Whether the oldest operation could run now."""
        if not self.pending:
            return False
        point, _ = self.pending[0]
        return point is None or point.reached_at is not None

    def work(self, operation: Callable[[], object]) -> None:
        """Queue a copy or a kernel."""

        def run() -> None:
            operation()
            self.clock += self._api.work_s

        self.pending.append((None, run))

    def _advance_to(self, point: _Point) -> None:
        assert point.reached_at is not None
        self.clock = max(self.clock, point.reached_at)


class FakeEvent:
    """As `torch.cuda.Event`: its latest recording counts, and without one it is done."""

    def __init__(self, api: FakeCuda, number: int, enable_timing: bool) -> None:
        self.number = number
        self.point: _Point | None = None
        self._api = api
        self._timing = enable_timing

    def record(self, stream: FakeStream) -> None:
        self._api.log.append(Entry("record", stream.number, self.number))
        point = _Point()

        def reach() -> None:
            point.reached_at = stream.clock

        stream.pending.append((None, reach))
        self.point = point

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
        self._events = 0
        self._current = self.Stream()
        self._patches = ExitStack()

    # What CudaDevice calls, named as in torch.cuda.

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> FakeStream:  # noqa: N802
        stream = FakeStream(self, len(self.streams), priority)
        self.streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        self._events += 1
        return FakeEvent(self, self._events, enable_timing)

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
        stream.pending.append((point, lambda: None))

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
            _, operation = choose(ready).pending.popleft()
            operation()


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


class FakeRuntime:
    """The CUDA runtime's host registration: refuses from the `refuse_from`-th call on, and keeps its last error."""

    OUT_OF_MEMORY: ClassVar[int] = 2

    def __init__(self, *, refuse_from: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.last_error = 0
        self._refuse_from = refuse_from

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
