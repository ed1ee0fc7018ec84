"""A device on which one kind of wait can be left out, and every call counted: to show that a check can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from layerstream.streams.cpu import CpuDevice

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from layerstream.streams.base import CopyBatch, Device, Event, Graph, Stream


class CutStream:
    """See `layerstream.streams.base.Stream`."""

    def __init__(self, inner: Stream, device: CutDevice) -> None:
        self.inner, self.name, self._device = inner, inner.name, device

    @property
    def raw(self) -> Any:
        """The framework's stream, where there is one."""
        return getattr(self.inner, "raw")  # noqa: B009 - no part of the contract

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        self._device.operations += 1
        self._device.recorded_on[id(event)] = self.name
        self._device.events.append(event)
        self.inner.record(event)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; left out if it is the edge that is cut."""
        self._device.operations += 1
        if (self._device.recorded_on.get(id(event)), self.name) != self._device.cut:
            self.inner.wait(event)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        self._device.operations += 1
        self.inner.copy(dst, src)

    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`."""
        self._device.operations += 1
        self.inner.copy_batch(batch)

    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`."""
        self._device.operations += 1
        self.inner.replay(graph)

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`."""
        self._device.operations += 1
        self.inner.launch(kernel, *args, **kwargs)


class CutDevice:
    """See `layerstream.streams.base.Device`: another device, but for what is cut."""

    def __init__(self, inner: Device, cut: tuple[str, str] | None = None) -> None:
        """
        Args:
            inner: does the work.
            cut: (stream, other stream): the second one's waits for events that the first one recorded are left out.
        """
        self.inner, self.kind, self.cut = inner, inner.kind, cut
        self.operations = 0
        """Calls that queue something or make an event or memory."""
        self.streams: dict[str, CutStream] = {}
        self.recorded_on: dict[int, str] = {}
        self.events: list[Event] = []
        """Kept, so that no other event gets the identity of one of them."""
        self.after_table: Callable[[], None] | None = None
        """Called whenever a table was made: work queued there is earlier than a load, and no upload waits for it."""

    def compute(self) -> CutStream:
        """See `Device.compute`."""
        return CutStream(self.inner.compute(), self)

    def stream(self, name: str, *, priority: int) -> CutStream:
        """See `Device.stream`."""
        self.streams[name] = CutStream(self.inner.stream(name, priority=priority), self)
        return self.streams[name]

    def event(self, *, in_graph: bool = False) -> Event:
        """See `Device.event`."""
        self.operations += 1
        return self.inner.event(in_graph=in_graph)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """See `Device.capture`."""
        return self.inner.capture(cast(CutStream, stream).inner, queue)

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`. Where an edge is cut there are no times: events that are not done have none."""
        return 0.0 if self.cut is not None else self.inner.elapsed(start, end)

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        self.operations += 1
        return self.inner.empty(nbytes)

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """See `Device.table`."""
        self.operations += 1
        table = self.inner.table(values)
        if self.after_table is not None:
            self.after_table()
        return table

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`."""
        return self.inner.close(timeout_s)


class ThreadedCpu(CpuDevice):
    """A CPU device whose compute stream is a thread as well, as a GPU's is no part of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._model = self.stream("compute", priority=0)

    def compute(self) -> Stream:
        """See `Device.compute`."""
        return self._model
