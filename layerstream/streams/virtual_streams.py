"""Streams and events of the virtual device: queues that only the device works off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from layerstream.errors import TransferError
from layerstream.streams.base import CopyBatch, Event, Graph
from layerstream.streams.capture import CallGraph, Capture, capturable
from layerstream.streams.copies import check_batch, check_copy, kept, move_rows

if TYPE_CHECKING:
    import torch

    from layerstream.streams.virtual import VirtualDevice

Engine: TypeAlias = Literal["to device", "to host"]
"""A copy engine, by its direction."""


class Point:
    """One recording of an event."""

    __slots__ = ("reached_at",)

    def __init__(self) -> None:
        self.reached_at: float | None = None


class VirtualEvent:
    """See `layerstream.streams.base.Event`. Done once it has run."""

    __slots__ = ("in_graph", "recorded")

    def __init__(self, *, in_graph: bool) -> None:
        self.in_graph = in_graph
        self.recorded: Point | None = None

    def point(self) -> Point:
        """The latest recording.

        Raises:
            TransferError: never recorded.
        """
        if self.recorded is None:
            raise TransferError("an event was used before it was recorded on any stream; record it first")
        return self.recorded

    def done(self) -> bool:
        """See `Event.done`.

        Raises:
            TransferError: never recorded.
        """
        return self.point().reached_at is not None


class Operation(NamedTuple):
    """Something queued."""

    number: int
    """Of all operations of the device, in the order of submission."""
    submitted_at: float
    seconds: float
    run: Callable[[], object] | None = None
    engine: Engine | None = None
    awaited: Point | None = None
    recorded: Point | None = None


class VirtualStream:
    """See `layerstream.streams.base.Stream`: a queue that only `VirtualDevice.run` works off."""

    def __init__(self, name: str, device: VirtualDevice, capture: Capture) -> None:
        self.name = name
        self.clock = 0.0
        """Virtual time in seconds at which everything that has run was over."""
        self.pending: deque[Operation] = deque()
        self._device = device
        self._capture = capture

    @capturable
    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        point = cast(VirtualEvent, event).recorded = Point()
        self._device.submit(self, self._device.costs.event_s, recorded=point)

    @capturable
    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        point = cast(VirtualEvent, event).point()
        self._device.submit(self, self._device.costs.event_s, awaited=point)

    @capturable
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`."""
        check_copy(self.name, dst, src)
        self._device.tables.copied(dst, src)
        device, costs = self._device, self._device.costs
        engine = device.engine(dst.data_ptr(), src.data_ptr())
        seconds = costs.copy_latency_s + src.nbytes / costs.copy_bytes_per_s
        if engine is None:
            seconds = costs.kernel_latency_s + 2 * src.nbytes / costs.kernel_bytes_per_s
        device.submit(self, costs.launch_s, seconds, lambda: np.copyto(dst.numpy(), src.numpy()), engine)

    @capturable
    def copy_batch(self, batch: CopyBatch) -> None:
        """See `Stream.copy_batch`. The first row tells the direction of all."""
        rows = check_batch(self.name, batch)
        device, costs = self._device, self._device.costs
        engine = device.engine(int(batch.targets[0]), int(batch.sources[0])) if rows else None
        nbytes = int(batch.nbytes.sum())
        seconds = costs.copy_latency_s + rows * costs.row_s + nbytes / costs.copy_bytes_per_s
        if engine is None:
            seconds = costs.kernel_latency_s + 2 * nbytes / costs.kernel_bytes_per_s
        own = kept(batch)
        device.submit(self, costs.launch_s + rows * costs.submit_row_s, seconds, lambda: move_rows(own), engine)

    @capturable
    def replay(self, graph: Graph) -> None:
        """See `Stream.replay`. The host pays for one launch."""
        calls = cast(CallGraph, graph)
        for event in calls.waits:
            cast(VirtualEvent, event).point()
        with self._device.one_submission():
            for method, args, kwargs in calls.calls:
                getattr(self, method)(*args, **kwargs)

    @capturable
    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. The kernel gets CPU memory; it costs what its declared accesses say, or no time."""
        seconds = self._device.kernel_seconds(kernel, args, kwargs)
        self._device.submit(self, self._device.costs.launch_s, seconds, lambda: kernel(*args, **kwargs))

    @capturable
    def work(self, seconds: float, operation: Callable[[], object] | None) -> None:
        """Queue `operation`, which takes `seconds` (`VirtualDevice.work`)."""
        self._device.submit(self, self._device.costs.launch_s, seconds, operation)
