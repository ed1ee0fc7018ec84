"""Streams, events and graphs of the CUDA device, over `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from layerstream.errors import TransferError
from layerstream.streams.base import CopyBatch, Event, Graph
from layerstream.streams.capture import CallGraph
from layerstream.streams.copies import check_copy

if TYPE_CHECKING:
    import torch

    from layerstream.streams.cuda import CudaDevice


class CudaEvent:
    """See `layerstream.streams.base.Event`."""

    __slots__ = ("_raw", "_recorded", "in_graph")

    def __init__(self, raw: Any, *, in_graph: bool) -> None:
        self.in_graph = in_graph
        self._raw = raw
        self._recorded = False

    def record(self, stream: Any) -> None:
        """Set to the point after everything queued on the `torch.cuda` stream so far."""
        self._raw.record(stream)
        self._recorded = True

    def capture(self, stream: Any) -> None:
        """Make recording it part of the work that is being captured on the `torch.cuda` stream."""
        self._raw.record(stream)

    def replayed(self) -> None:
        """Take note that captured work which records it has been queued."""
        self._recorded = True

    def recorded(self) -> Any:
        """The `torch.cuda` event.

        Raises:
            TransferError: never recorded. CUDA would call it done and let every wait for it pass.
        """
        if not self._recorded:
            raise TransferError("an event was used before it was recorded on any stream; record it first")
        return self._raw

    @property
    def raw(self) -> Any:
        """The `torch.cuda` event, recorded or not."""
        return self._raw

    def done(self) -> bool:
        """See `Event.done`.

        Raises:
            TransferError: never recorded, or the CUDA context is broken.
        """
        event = self.recorded()
        try:
            return bool(event.query())
        except RuntimeError as error:
            raise TransferError(f"CUDA failed before or in a transfer: {error}") from error


class CudaGraph(CallGraph):
    """A `torch.cuda.CUDAGraph`, and the calls it was made of."""

    __slots__ = ("_raw",)

    def __init__(self, calls: CallGraph, raw: Any) -> None:
        super().__init__(calls.calls)
        self._raw = raw

    def replay(self) -> None:
        """Queue it on torch's current stream.

        Raises:
            TransferError: it waits for an event that was never recorded.
        """
        for event in self.waits:
            cast(CudaEvent, event).recorded()
        self._raw.replay()
        for event in self.records:
            cast(CudaEvent, event).replayed()


class CudaStream:
    """See `layerstream.streams.base.Stream`."""

    __slots__ = ("_device", "name", "raw")

    def __init__(self, name: str, raw: Any, device: CudaDevice) -> None:
        self.name = name
        self.raw = raw
        self._device = device

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        if self._captured("record", event):
            cast(CudaEvent, event).capture(self.raw)
        else:
            cast(CudaEvent, event).record(self.raw)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        cuda = cast(CudaEvent, event)
        self.raw.wait_event(cuda.raw if self._captured("wait", event) else cuda.recorded())

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`. Blocks the host only where one side is pageable host memory."""
        check_copy(self.name, dst, src)
        self._captured("copy", dst, src)
        with self._device.api.stream(self.raw):
            dst.copy_(src, non_blocking=True)

    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`.

        Raises:
            TransferError: the batch is malformed, or the driver refused it.
        """
        captured = self._captured("copy_batch", batch)
        with self._device.api.stream(self.raw):
            self._device.driver().copy_batch(self.raw.cuda_stream, batch, singly=captured)

    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`.

        Raises:
            TransferError: the graph waits for an event that was never recorded.
        """
        self._captured("replay", graph)
        with self._device.api.stream(self.raw):
            cast(CudaGraph, graph).replay()

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. Triton launches on torch's current stream, which this is during the call."""
        self._captured("launch", kernel, *args, **kwargs)
        with self._device.api.stream(self.raw):
            kernel(*args, **kwargs)

    def _captured(self, method: str, /, *args: Any, **kwargs: Any) -> bool:
        """Whether this call becomes part of a graph."""
        capturing = self._device.capturing
        if capturing.stream is None:
            return False
        capturing.keep(self.raw.cuda_stream, method, *args, **kwargs)
        return True
