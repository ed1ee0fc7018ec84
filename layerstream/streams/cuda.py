"""The CUDA device, over `torch.cuda`. Nothing here touches CUDA before a device is made, and nothing synchronizes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from layerstream.errors import TransferError
from layerstream.streams.base import Event, Graph, Stream
from layerstream.streams.capture import Capture, check_timing
from layerstream.streams.cuda_streams import CudaEvent, CudaGraph, CudaStream
from layerstream.streams.driver import CudaDriver

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


logger = logging.getLogger(__name__)

TABLE_ENTRIES = 4096
"""Least entries of a host buffer for tables; larger ones are powers of two, so that few sizes are ever pinned."""
TABLE_BUFFERS = 4
"""Host buffers that are pinned at first: two steps in flight, with two tables each."""
POLL_S = 1e-3
"""Seconds between looks at a stream that is being closed."""


@dataclass(slots=True, eq=False)
class _Upload:
    """A pinned host buffer of tables, free again once `passed` is."""

    host: torch.Tensor
    array: npt.NDArray[np.int32]
    passed: Any


class CudaDevice:
    """See `layerstream.streams.base.Device`. Make all streams before the first table."""

    kind = "cuda"

    def __init__(self, index: int, *, api: Any = None, driver: CudaDriver | None = None) -> None:
        """
        Args:
            index: the CUDA device.
            api: what provides `Stream`, `Event`, `CUDAGraph`, `current_stream` and the context manager `stream`:
                `torch.cuda` unless given.
            driver: queues batches of copies; None makes one over the loaded driver when it is first needed.
        """
        self.api = torch.cuda if api is None else api
        self.capturing = Capture()
        """What is being captured."""
        self._driver = driver
        self._device = torch.device("cuda", index)
        self._streams: dict[str, Any] = {}
        self._uploads: deque[_Upload] = deque()

    def compute(self) -> Stream:
        """See `Device.compute`."""
        return CudaStream("compute", self.api.current_stream(self._device), self)

    def driver(self) -> CudaDriver:
        """Calls of the CUDA driver beyond torch's.

        Raises:
            TransferError: the driver is not loaded.
        """
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver

    def stream(self, name: str, *, priority: int) -> Stream:
        """See `Device.stream`. CUDA's lowest priority is the default stream's: a negative `priority` becomes it."""
        # torch has 32 streams of a priority and hands them out in turn: made anew for every measured point, ours would
        # be handed out again to others. It counts downward, -1 before 0.
        raw = self._streams.get(name)
        if raw is None:
            raw = self._streams[name] = self.api.Stream(device=self._device, priority=min(0, -priority))
        return CudaStream(name, raw, self)

    def event(self, *, in_graph: bool = False) -> Event:
        """See `Device.event`. A captured wait for an `external` event becomes a node of the graph.

        Raises:
            TransferError: an event for graphs is asked for while the current stream is captured.
        """
        if not in_graph:
            return CudaEvent(self.api.Event(enable_timing=True), in_graph=False)
        self.capturing.refuse("an event for graphs made")
        if self.api.is_current_stream_capturing():
            raise TransferError("an event for graphs made while the current stream is captured; make it before")
        raw = self.api.Event(external=True)
        # torch makes the CUDA event when it is first recorded; a wait captured before that would leave no node behind
        # (ATen/cuda/CUDAEvent.h, `block`).
        raw.record(self.api.current_stream(self._device))
        return CudaEvent(raw, in_graph=True)

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """See `Device.capture`. Other threads may go on using CUDA meanwhile.

        Raises:
            TransferError: `queue` did what cannot be captured, or CUDA ended the capture.
        """
        cuda = cast(CudaStream, stream)
        raw = self.api.CUDAGraph()

        def capture() -> None:
            # Not `torch.cuda.graph`, which synchronizes the device and empties torch's caches first.
            raw.capture_begin(capture_error_mode="thread_local")
            try:
                queue()
            except BaseException:
                # What ended the capture is told, not that it ended.
                with suppress(RuntimeError):
                    raw.capture_end()
                raise
            raw.capture_end()

        try:
            with self.api.stream(cuda.raw):
                return CudaGraph(self.capturing.run(cuda.raw.cuda_stream, cuda.name, capture), raw)
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(f"work on stream {cuda.name!r} could not be captured: {error}") from error

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`.

        Raises:
            TransferError: one of the events is not done or has no timing, or the CUDA context is broken.
        """
        check_timing(start, end)
        milliseconds = cast(CudaEvent, start).recorded().elapsed_time(cast(CudaEvent, end).recorded())
        return float(milliseconds) / 1e3

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`. Keep it until every stream that uses it is past the use: only tables may go earlier."""
        self.capturing.refuse("device memory made")
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """See `Device.table`. Uploaded on the compute stream."""
        self.capturing.refuse("a table made")
        count = len(values)
        upload = self._upload_buffer(count)
        upload.array[:count] = values
        table = torch.empty(count, dtype=torch.int32, device=self._device)
        table.copy_(upload.host[:count], non_blocking=True)
        upload.passed.record(self.api.current_stream(self._device))
        self._uploads.append(upload)
        # torch gives the memory of a dropped table to the compute stream's next allocation at once, whatever other
        # streams still read. Told of them, it waits for what they had queued when the table was dropped.
        for stream in self._streams.values():
            table.record_stream(stream)
        return table

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`. A broken CUDA context counts as work still running: nobody knows what it did."""
        deadline = time.monotonic() + timeout_s
        for stream in self._streams.values():
            try:
                while not stream.query():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(POLL_S)
            except RuntimeError as error:
                logger.warning("Closing streams of %s: CUDA had failed before (%s)", self._device, error)
                return False
        self._streams.clear()
        self._uploads.clear()
        return True

    def _upload_buffer(self, count: int) -> _Upload:
        """A buffer whose copy has run, else one more: a table never waits for the device."""
        if not self._uploads:
            # With the first table, at start: to pin memory may wait for what the device runs.
            self._uploads.extend(self._new_upload(TABLE_ENTRIES) for _ in range(TABLE_BUFFERS))
        for upload in self._uploads:
            if upload.host.numel() >= count and upload.passed.query():
                self._uploads.remove(upload)
                return upload
        return self._new_upload(max(TABLE_ENTRIES, 1 << (count - 1).bit_length()))

    def _new_upload(self, entries: int) -> _Upload:
        host = torch.empty(entries, dtype=torch.int32, pin_memory=True)
        return _Upload(host, host.numpy(), self.api.Event())
