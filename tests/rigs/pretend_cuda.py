"""`torch.cuda` pretended on CPU tensors, for code that asks it for streams, events, delays and graphs directly.

What is queued runs in virtual time, the stream whose clock is behind first, some of it each time the host looks. Direct
calls of torch on tensors happen at once; whatever `Stream.launch` is given is queued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from layerstream.kernels import reference
from layerstream.pipeline.paged_cache import PageKernels
from layerstream.streams.cuda import CudaDevice
from layerstream.streams.cuda_streams import CudaStream
from profiles.gpu_validate import bench
from tests.rigs.fake_cuda import FakeCuda, FakeEvent, FakeStream, Operation
from tests.rigs.path_rig import KnownMemory

CYCLES_PER_S = 1e9
OPERATIONS_A_LOOK = 16
FREE_BYTES = 2 << 30


class PretendEvent(FakeEvent):
    def record(self, stream: FakeStream | None = None) -> None:
        super().record(self._api.current_stream() if stream is None else stream)

    def query(self) -> bool:
        self._api.look()  # type: ignore[attr-defined]
        return super().query()

    def synchronize(self) -> None:
        self._api.settle()  # type: ignore[attr-defined]


class PretendStream(FakeStream):
    def query(self) -> bool:
        self._api.look()  # type: ignore[attr-defined]
        return super().query()


class PretendCuda(FakeCuda):
    def __init__(self) -> None:
        self.running: FakeStream | None = None
        super().__init__()
        self.work_s = 1e-6

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:  # noqa: N802
        stream = PretendStream(self, len(self.streams), priority)
        self.streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False, external: bool = False) -> FakeEvent:  # noqa: N802
        self._events += 1
        return PretendEvent(self, self._events, enable_timing, external)

    def look(self, operations: int = OPERATIONS_A_LOOK) -> None:
        while operations and (ready := [stream for stream in self.streams if stream.runnable()]):
            self.running = min(ready, key=lambda stream: stream.clock)
            self.running.pending.popleft().run()
            self.running = None
            operations -= 1

    def settle(self, device: Any = None) -> None:
        self.look(-1)

    def sleep(self, cycles: int) -> None:
        if self.running is not None:
            self.running.clock += cycles / CYCLES_PER_S
        else:
            self._current.work(lambda: self.sleep(cycles))

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        with self.stream(self.Stream()):
            graph.capture_begin()
            yield
            graph.capture_end()

    def queueing(self, function: Callable[..., None]) -> Callable[..., None]:
        kernel = self.kernel(function)
        kernel.queues = True  # type: ignore[attr-defined]
        return kernel

    def kernels(self) -> PageKernels:
        return PageKernels(
            *(self.queueing(skipping_large_ids(getattr(reference, name))) for name in PageKernels._fields)
        )


def skipping_large_ids(kernel: Callable[..., None]) -> Callable[..., None]:
    """The reference refuses what the kernels of a GPU skip."""

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> None:
        *others, blocks = args
        form = next(getattr(each, "form", each) for each in args if hasattr(each, "form") or hasattr(each, "run_bytes"))
        kernel(*others, torch.where(blocks >= form.num_pages, -1, blocks), **options)

    return call


class Grid:
    """A Triton kernel that does nothing."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def pretend_cuda(*openers: Any) -> Iterator[PretendCuda]:
    """Pretend, also towards modules that name `open_device`."""
    api = PretendCuda()

    def launch(stream: CudaStream, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        stream._captured("launch", kernel, *args, **kwargs)
        with api.stream(stream.raw):
            if hasattr(kernel, "queues"):
                kernel(*args, **kwargs)
            else:
                # Called once when it runs, in a graph once for each replay.
                api._current.push(Operation(lambda: None, now=lambda _: Operation(lambda: kernel(*args, **kwargs))))

    about = SimpleNamespace(name="Pretended", multi_processor_count=2, total_memory=FREE_BYTES, major=9, minor=0)
    stand_ins = {
        "Stream": api.Stream,
        "Event": api.Event,
        "CUDAGraph": api.CUDAGraph,
        "current_stream": api.current_stream,
        "is_current_stream_capturing": api.is_current_stream_capturing,
        "stream": api.stream,
        "graph": api.graph,
        "synchronize": api.settle,
        "_sleep": api.sleep,
        "mem_get_info": lambda _: (FREE_BYTES, FREE_BYTES),
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: about,
    }

    def opened(_: torch.device) -> tuple[CudaDevice, KnownMemory, PageKernels]:
        return CudaDevice(0), KnownMemory(), api.kernels()

    with ExitStack() as patches:
        for name, stand_in in stand_ins.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        patches.enter_context(mock.patch.object(CudaStream, "launch", launch))
        patches.enter_context(mock.patch.object(bench, "_cycles", []))
        for module in openers:
            patches.enter_context(mock.patch.object(module, "open_device", opened))
        patches.enter_context(api)
        yield api
