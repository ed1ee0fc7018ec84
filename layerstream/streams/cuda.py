"""The CUDA device, over `torch.cuda`. Nothing here touches CUDA before a device is made, and nothing synchronizes."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from layerstream.errors import TransferError
from layerstream.streams.base import Event, Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

TABLE_ENTRIES = 4096
"""Least entries of a host buffer for tables; larger ones are powers of two, so that few sizes are ever pinned."""
POLL_S = 1e-3
"""Seconds between looks at a stream that is being closed."""


class CudaEvent:
    """See `layerstream.streams.base.Event`."""

    __slots__ = ("_raw", "_recorded")

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._recorded = False

    def record(self, stream: Any) -> None:
        """Set to the point after everything queued on the `torch.cuda` stream so far."""
        self._raw.record(stream)
        self._recorded = True

    def recorded(self) -> Any:
        """The `torch.cuda` event.

        Raises:
            TransferError: never recorded. CUDA would call it done and let every wait for it pass.
        """
        if not self._recorded:
            raise TransferError("an event was used before it was recorded on any stream; record it first")
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


class CudaStream:
    """See `layerstream.streams.base.Stream`."""

    __slots__ = ("_api", "_raw", "name")

    def __init__(self, name: str, raw: Any, api: Any) -> None:
        self.name = name
        self._raw = raw
        self._api = api

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        cast(CudaEvent, event).record(self._raw)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        self._raw.wait_event(cast(CudaEvent, event).recorded())

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """See `Stream.copy`. Blocks the host only where one side is pageable host memory."""
        # Checked, as torch would spread a source of one byte over the destination.
        if dst.numel() != src.numel():
            raise TransferError(
                f"copy on stream {self.name!r}: {src.numel()} bytes into {dst.numel()}; both sides must be equally long"
            )
        with self._api.stream(self._raw):
            dst.copy_(src, non_blocking=True)

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """See `Stream.launch`. Triton launches on torch's current stream, which this is during the call."""
        with self._api.stream(self._raw):
            kernel(*args, **kwargs)


@dataclass(slots=True)
class _Upload:
    """A pinned host buffer of tables, free again once `passed` is."""

    host: torch.Tensor
    array: npt.NDArray[np.int32]
    passed: Any


class CudaDevice:
    """See `layerstream.streams.base.Device`. Make all streams before the first table."""

    kind = "cuda"

    def __init__(self, index: int, *, api: Any = None) -> None:
        """
        Args:
            index: the CUDA device.
            api: what provides `Stream`, `Event`, `current_stream` and the context manager `stream`: `torch.cuda`
                unless given.
        """
        self._api = torch.cuda if api is None else api
        self._device = torch.device("cuda", index)
        self._streams: list[Any] = []
        self._uploads: deque[_Upload] = deque()

    def compute(self) -> Stream:
        """See `Device.compute`."""
        return CudaStream("compute", self._api.current_stream(self._device), self._api)

    def stream(self, name: str, *, priority: int) -> Stream:
        """See `Device.stream`. CUDA's lowest priority is the default stream's: a negative `priority` becomes it."""
        # torch counts downward (-1 goes before 0) and moves what is out of range to the nearest the device has.
        raw = self._api.Stream(device=self._device, priority=-priority)
        self._streams.append(raw)
        return CudaStream(name, raw, self._api)

    def event(self) -> Event:
        """See `Device.event`."""
        return CudaEvent(self._api.Event(enable_timing=True))

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`.

        Raises:
            TransferError: one of the events is not done, or the CUDA context is broken.
        """
        if not (start.done() and end.done()):
            raise TransferError("time was asked between events of which one is not done; ask done() first")
        milliseconds = cast(CudaEvent, start).recorded().elapsed_time(cast(CudaEvent, end).recorded())
        return float(milliseconds) / 1e3

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`. Keep it until every stream that uses it is past the use: only tables may go earlier."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def table(self, values: Sequence[int]) -> torch.Tensor:
        """See `Device.table`. Uploaded on the compute stream."""
        count = len(values)
        upload = self._upload_buffer(count)
        upload.array[:count] = values
        table = torch.empty(count, dtype=torch.int32, device=self._device)
        table.copy_(upload.host[:count], non_blocking=True)
        upload.passed.record(self._api.current_stream(self._device))
        self._uploads.append(upload)
        # torch gives the memory of a dropped table to the compute stream's next allocation at once, whatever other
        # streams still read. Told of them, it waits for what they had queued when the table was dropped.
        for stream in self._streams:
            table.record_stream(stream)
        return table

    def close(self, timeout_s: float) -> bool:
        """See `Device.close`. A broken CUDA context counts as work still running: nobody knows what it did."""
        deadline = time.monotonic() + timeout_s
        for stream in self._streams:
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
        """The oldest buffer if its copy has run, else one more: a table never waits for the device."""
        if self._uploads and self._uploads[0].passed.query():
            upload = self._uploads.popleft()
            if upload.host.numel() >= count:
                return upload
        entries = max(TABLE_ENTRIES, 1 << (count - 1).bit_length())
        host = torch.empty(entries, dtype=torch.int32, pin_memory=True)
        return _Upload(host, host.numpy(), self._api.Event())


class CudaPinner:
    """Pins host memory through the CUDA runtime that torch loaded (`layerstream.host_pool.Pinner`).

    Called by ctypes, since `torch.cuda.cudart()` has no `cudaGetLastError`: a refused registration leaves an error in
    the runtime that the next innocent, checked call would raise.
    """

    def __init__(self, runtime: Any = None) -> None:
        """
        Args:
            runtime: has `cudaHostRegister(address, nbytes, flags)`, `cudaHostUnregister(address)` and
                `cudaGetLastError()`, each returning a CUDA error number; None finds the loaded library, and without
                one every registration is refused.
        """
        self._runtime: Any = loaded_cudart() if runtime is None else runtime

    def register(self, address: int, nbytes: int) -> bool:
        """See `Pinner.register`."""
        if self._runtime is None:
            return False
        code = self._runtime.cudaHostRegister(address, nbytes, 0)
        if code != 0:
            self._runtime.cudaGetLastError()
            logger.debug("cudaHostRegister(%d bytes) was refused with CUDA error %d", nbytes, code)
        return bool(code == 0)

    def unregister(self, address: int) -> None:
        """See `Pinner.unregister`. An error leaves the memory pinned until the process ends, and is only logged."""
        code = self._runtime.cudaHostUnregister(address)
        if code != 0:
            self._runtime.cudaGetLastError()
            logger.warning("cudaHostUnregister failed with CUDA error %d; the memory stays pinned", code)


def loaded_cudart(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL | None:
    """The CUDA runtime library that is already part of this process; None if there is none.

    Args:
        maps: the kernel's list of mapped files (proc_pid_maps(5)).
    """
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        # Wheels rename it: libcudart.so.12, libcudart-1a2b3c4d.so.13.
        if path and Path(path[0]).name.startswith("libcudart"):
            library = ctypes.CDLL(path[0])
            library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
            return library
    return None
