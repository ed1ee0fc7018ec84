"""A device that counts what is queued on its streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from layerstream.streams.base import CopyBatch, Device, Event, Graph, Stream


class CountingStream:
    """A stream that counts every operation and hands it on."""

    def __init__(self, stream: Stream, counts: Counter[str]) -> None:
        self.name = stream.name
        self.counted = stream
        self._counts = counts

    def record(self, event: Event) -> None:
        self._counts["record"] += 1
        self.counted.record(event)

    def wait(self, event: Event) -> None:
        self._counts["wait"] += 1
        self.counted.wait(event)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._counts["copy"] += 1
        self.counted.copy(dst, src)

    def copy_batch(self, batch: CopyBatch) -> None:
        self._counts["copy"] += 1
        self.counted.copy_batch(batch)

    def replay(self, graph: Graph) -> None:
        self._counts["replay"] += 1
        self.counted.replay(graph)

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        self._counts["launch"] += 1
        self.counted.launch(kernel, *args, **kwargs)


class CountingDevice:
    """A device whose streams count, and which counts uploads of tables too. See `layerstream.streams.base.Device`."""

    def __init__(self, device: Device) -> None:
        self.kind = device.kind
        self.counts: Counter[str] = Counter()
        self._device = device

    def compute(self) -> Stream:
        return CountingStream(self._device.compute(), self.counts)

    def stream(self, name: str, *, priority: int) -> Stream:
        return CountingStream(self._device.stream(name, priority=priority), self.counts)

    def event(self, *, in_graph: bool = False) -> Event:
        return self._device.event(in_graph=in_graph)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        assert isinstance(stream, CountingStream)
        return self._device.capture(stream.counted, queue)

    def elapsed(self, start: Event, end: Event) -> float:
        return self._device.elapsed(start, end)

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._device.empty(nbytes)

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        self.counts["table"] += 1
        return self._device.table(values)

    def close(self, timeout_s: float) -> bool:
        return self._device.close(timeout_s)
