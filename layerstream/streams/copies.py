"""What copies are checked for, and copies of host memory by address."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from layerstream.errors import TransferError
from layerstream.streams.base import CopyBatch

if TYPE_CHECKING:
    import torch


def check_copy(stream: str, dst: torch.Tensor, src: torch.Tensor) -> None:
    """Refuse a copy that torch or numpy would broadcast: a source of one byte over the whole destination.

    Raises:
        TransferError: the two sides differ in length.
    """
    if dst.numel() != src.numel():
        raise TransferError(
            f"copy on stream {stream!r}: {src.numel()} bytes into {dst.numel()}; both sides must be equally long"
        )


def check_batch(stream: str, batch: CopyBatch) -> int:
    """Rows of a batch that can be handed to a device.

    Raises:
        TransferError: the arrays are not `uint64[n]` of one length and contiguous, or a row copies nothing.
    """
    rows = batch.targets.size
    for field, array in zip(batch._fields, batch, strict=True):
        if array.dtype != np.uint64 or array.shape != (rows,) or not array.flags.c_contiguous:
            raise TransferError(
                f"batch copy on stream {stream!r}: {field} is {array.dtype}{list(array.shape)}; all three arrays must "
                f"be contiguous uint64[{rows}]"
            )
    if not batch.nbytes.all():
        raise TransferError(f"batch copy on stream {stream!r}: a row has no bytes; leave such rows out")
    return rows


def kept(batch: CopyBatch) -> CopyBatch:
    """A copy of the three arrays, which the caller may then change."""
    return CopyBatch(*(array.copy() for array in batch))


def move_rows(batch: CopyBatch) -> None:
    """Copy every row within host memory. Releases the GIL for the length of each row."""
    for target, source, nbytes in zip(*(array.tolist() for array in batch), strict=True):
        ctypes.memmove(target, source, nbytes)
