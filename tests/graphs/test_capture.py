"""What is asked of CUDA to capture pieces."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from layerstream.graphs.capture import CudaGraphs, graph_api_for


class Cuda:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current: Any = "model"
        self.broken = False

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self) -> Any:  # noqa: N802
        return Queue("aside", self)

    def current_stream(self) -> Any:
        return Queue("model", self) if self.current == "model" else self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = stream
        yield
        self.current = "model"

    def CUDAGraph(self) -> Any:  # noqa: N802
        return Graph(self)


class Queue:
    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self._cuda = name, cuda

    def wait_stream(self, other: Queue) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._cuda.log.append(("begin", self._cuda.current_stream().name, pool, capture_error_mode, gc.isenabled()))

    def capture_end(self) -> None:
        self._cuda.log.append("end")
        if self._cuda.broken:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_pieces_share_a_pool_on_a_stream_of_their_own_ordered_with_the_model() -> None:
    cuda = Cuda()
    graphs = CudaGraphs(cuda)
    with graphs.aside():
        for _ in range(2):
            graphs.end(graphs.begin())
    begin = ("begin", "aside", "pool", "thread_local", False)
    assert cuda.log == ["aside waits for model", begin, "end", begin, "end", "model waits for aside"]
    assert gc.isenabled()


def fail_in_a_capture(graphs: CudaGraphs, cuda: Cuda) -> None:
    with graphs.aside():
        graphs.begin()
        cuda.broken = True
        try:
            raise ValueError("in the module")
        finally:
            graphs.abandon()
            graphs.abandon()


def test_a_failed_capture_is_ended_once_and_its_second_error_is_not_raised() -> None:
    cuda = Cuda()
    with pytest.raises(ValueError, match="in the module"):
        fail_in_a_capture(CudaGraphs(cuda), cuda)
    assert cuda.log.count("end") == 1 and cuda.log[-1] == "model waits for aside"
    assert gc.isenabled()


def test_a_cpu_has_no_graphs() -> None:
    assert graph_api_for(torch.device("cpu")) is None
