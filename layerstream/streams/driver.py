"""Calls of the CUDA driver that torch does not offer: batches of copies, and waits for a value in memory.

Called by ctypes from the library that torch loaded. Every call is queued on a stream and returns at once. The calling
thread must have used the device before, as any thread of torch that made or used a stream has: the driver's calls need
its context to be current.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any

from layerstream.errors import TransferError
from layerstream.streams.base import CopyBatch
from layerstream.streams.copies import check_batch

logger = logging.getLogger(__name__)

BATCH_ROWS = 4096
"""Most copies handed over by one call. ROCm's `hipMemcpyBatchAsync`, to which the same code maps, faults above 8192
rows; half of that costs one more call in 4096 copies."""
NOT_SUPPORTED = 801
"""`CUDA_ERROR_NOT_SUPPORTED` (cuda.h, `CUresult`)."""
NULL_STREAMS = (0, 1)
"""Handles of the legacy default stream (0, and `CU_STREAM_LEGACY`), on which batches are not allowed."""
WAIT_VALUE_EQ = 1
"""`CU_STREAM_WAIT_VALUE_EQ`: go on once the value in memory equals the one given."""
SOURCE_ORDER_STREAM = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in stream order. Anything weaker would let a copy read a
staging buffer or a KV block before the kernel that fills it, queued earlier, has run."""
PREFER_OVERLAP = 1
"""`CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`: a hint to leave the multiprocessors to the model."""

_ADDRESS, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
_BATCH = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE]
_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuMemcpyAsync": [ctypes.c_uint64, ctypes.c_uint64, _SIZE, _ADDRESS],
    # CUDA 13 left out `failIdx` and gave the shorter form a name of its own; drivers export both.
    "cuMemcpyBatchAsync_v2": [*_BATCH, _ADDRESS],
    "cuMemcpyBatchAsync": [*_BATCH, _ADDRESS, _ADDRESS],
    # cuda.h maps the plain names to these.
    "cuStreamWaitValue32_v2": [_ADDRESS, ctypes.c_uint64, _UINT, ctypes.c_uint],
    "cuStreamWriteValue32_v2": [_ADDRESS, ctypes.c_uint64, _UINT, ctypes.c_uint],
}


class _Location(ctypes.Structure):
    """`CUmemLocation`: as hints for operands without a place of their own, all zero."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes` (cuda.h)."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """The driver calls, each with a stream's handle (`torch.cuda.Stream.cuda_stream`)."""

    def __init__(self, library: Any = None, *, load: bool = False) -> None:
        """
        Args:
            library: has the functions of `cuda.h` by their exported names; None finds the loaded driver.
            load: load `libcuda.so.1` if the process has not.

        Raises:
            TransferError: there is no driver.
        """
        found = loaded_driver(load=load) if library is None else library
        if found is None:
            raise TransferError(
                "the CUDA driver (libcuda.so.1) is not loaded in this process; use the device through torch.cuda first"
            )
        self._library = found
        self._attributes = MemcpyAttributes(source_order=SOURCE_ORDER_STREAM, flags=PREFER_OVERLAP)
        self._first_row = ctypes.c_size_t(0)
        self._failed_row = ctypes.c_size_t()
        self._batch = self._batch_call()

    @property
    def batches(self) -> bool:
        """Whether copies go out in batches; False once the driver has refused one as not supported."""
        return self._batch is not None

    def copy_batch(self, stream: int, batch: CopyBatch, *, singly: bool = False) -> None:
        """Queue a batch of copies, in calls of at most `BATCH_ROWS`, or one by one where batches are not possible.

        Args:
            stream: the handle.
            batch: device addresses, and addresses of pinned host memory.
            singly: one by one in any case. For captures, as cuda.h promises nothing about capturing a batch.

        Raises:
            TransferError: the batch is malformed, or the driver refused it; calls before the refused one are queued.
        """
        rows = check_batch(f"{stream:#x}", batch)
        addresses = [array.__array_interface__["data"][0] for array in batch]
        first = 0
        while first < rows and self._batch is not None and not singly and stream not in NULL_STREAMS:
            count = min(BATCH_ROWS, rows - first)
            targets, sources, sizes = (address + 8 * first for address in addresses)
            code = self._batch(stream, targets, sources, sizes, count)
            if code == NOT_SUPPORTED:
                logger.info("The CUDA driver does not support batches of copies; they are queued one by one")
                self._batch = None
                break
            if code:
                raise self._error(f"a batch of {count} copies", code)
            first += count
        if first < rows:
            self._one_by_one(stream, batch, first)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Keep the stream behind a 32-bit value in device memory: it goes on once the value equals `value`.

        The driver does not see this order, and its scheduler may rely on events alone: whoever writes the value must
        be ordered by an event as well, or must not depend on anything queued behind this wait.

        Raises:
            TransferError: the driver refused.
        """
        self._queue("cuStreamWaitValue32_v2", "a wait for a value", stream, address, value & 0xFFFFFFFF, WAIT_VALUE_EQ)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Queue a write of a 32-bit value, visible only after all that the stream wrote before it.

        Raises:
            TransferError: the driver refused.
        """
        self._queue("cuStreamWriteValue32_v2", "a write of a value", stream, address, value & 0xFFFFFFFF, 0)

    def _one_by_one(self, stream: int, batch: CopyBatch, first: int) -> None:
        copy = self._library.cuMemcpyAsync
        for target, source, nbytes in zip(*(array[first:].tolist() for array in batch), strict=True):
            code = copy(target, source, nbytes, stream)
            if code:
                raise self._error(f"a copy of {nbytes} bytes from {source:#x} to {target:#x}", code)

    def _batch_call(self) -> Callable[[int, int, int, int, int], int] | None:
        """The batch copy as `call(stream, targets, sources, sizes, count)`, whichever form the driver has."""
        attributes = (ctypes.addressof(self._attributes), ctypes.addressof(self._first_row), 1)
        short = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        if short is not None:
            return lambda stream, targets, sources, sizes, count: int(
                short(targets, sources, sizes, count, *attributes, stream)
            )
        long = getattr(self._library, "cuMemcpyBatchAsync", None)
        if long is None:
            return None
        failed_row = ctypes.addressof(self._failed_row)
        return lambda stream, targets, sources, sizes, count: int(
            long(targets, sources, sizes, count, *attributes, failed_row, stream)
        )

    def _queue(self, function: str, what: str, *args: int) -> None:
        call = getattr(self._library, function, None)
        if call is None:
            raise TransferError(f"the CUDA driver has no {function}; {what} needs CUDA 12 or newer")
        code = call(*args)
        if code:
            raise self._error(what, code)

    def _error(self, what: str, code: int) -> TransferError:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        text = name.value.decode() if name.value else "an unknown error"
        return TransferError(f"the CUDA driver refused {what}: {text} ({code})")


def loaded_driver(*, load: bool = False) -> ctypes.CDLL | None:
    """The CUDA driver library that is part of this process; with `load`, else the system's; None if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=ctypes.DEFAULT_MODE if load else os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = types
    return library
