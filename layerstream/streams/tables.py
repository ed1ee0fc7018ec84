"""What device tables hold, as it was on the host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from layerstream.errors import TransferError

if TYPE_CHECKING:
    import torch


class TableCopies:
    """What device tables hold, as it was on the host: reading them back would wait for the device."""

    def __init__(self) -> None:
        self._tables: dict[int, npt.NDArray[np.uint8]] = {}

    def set(self, tensor: torch.Tensor, values: npt.ArrayLike) -> None:
        """Say what a device tensor holds for work that is queued from here on, for as long as its storage lives.

        What was never told of a storage, a part of which was, counts as ids of -1.
        """
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._tables:
            self._tables[key] = np.full(storage.nbytes(), 0xFF, dtype=np.uint8)
            weakref.finalize(storage, self._tables.pop, key, None).atexit = False
        start = tensor.data_ptr() - key
        self._tables[key][start : start + tensor.nbytes] = np.asarray(values, dtype=_dtype(tensor)).view(np.uint8)

    def copied(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Note that a copy from `src` to `dst` was queued, in case it moves ids: a table uploaded to where a captured
        graph looks for it."""
        if src.untyped_storage().data_ptr() in self._tables:
            self.set(dst, self.ids(src))
        elif dst.untyped_storage().data_ptr() in self._tables:
            on_host = src.device.type == "cpu"
            self.set(dst, src.numpy() if on_host else np.full(dst.nbytes, 0xFF, dtype=np.uint8).view(_dtype(dst)))

    def ids(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """What a table, or a slice or another view of one, holds. See `Ids`.

        A tensor that is no table is read where it lies in host memory.

        Raises:
            TransferError: it is device memory whose values nobody told.
        """
        storage = tensor.untyped_storage()
        table = self._tables.get(storage.data_ptr())
        if table is None:
            if tensor.device.type != "cpu":
                raise TransferError(
                    "a kernel was given ids in device memory that nobody told; make the table with device.table, or "
                    "tell its values with tables.set"
                )
            values: npt.NDArray[Any] = tensor.numpy()
            return values
        start = tensor.data_ptr() - storage.data_ptr()
        return table[start : start + tensor.nbytes].view(_dtype(tensor))


def _dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))
