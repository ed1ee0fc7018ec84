"""Pinning host memory for CUDA."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class CudaPinner:
    """Pins host memory through the CUDA runtime that torch loaded (`layerstream.host_pool.Pinner`).

    Called by ctypes, since `torch.cuda.cudart()` has no `cudaGetLastError`: a refused registration leaves an error in
    the runtime that the next innocent, checked call would raise.
    """

    def __init__(self, runtime: Any = None, *, device: int = 0) -> None:
        """
        Args:
            runtime: has `cudaHostRegister(address, nbytes, flags)`, `cudaHostUnregister(address)`,
                `cudaSetDevice(index)` and `cudaGetLastError()`, each returning a CUDA error number; None finds the
                loaded library, and without one every registration is refused.
            device: the CUDA device that is to reach the memory.
        """
        self._runtime: Any = loaded_cudart() if runtime is None else runtime
        self._device = device

    def register(self, address: int, nbytes: int) -> bool:
        """See `Pinner.register`."""
        if self._runtime is None:
            return False
        # A new thread's device is 0, and the call would make a context there: on every rank but the first, a waste of
        # another rank's memory.
        code = self._runtime.cudaSetDevice(self._device) or self._runtime.cudaHostRegister(address, nbytes, 0)
        if code != 0:
            self._runtime.cudaGetLastError()
            logger.debug("cudaHostRegister(%d bytes) was refused with CUDA error %d", nbytes, code)
        return bool(code == 0)

    def unregister(self, address: int) -> None:
        """See `Pinner.unregister`. An error leaves the memory pinned until the process ends, and is only logged."""
        code = self._runtime.cudaSetDevice(self._device) or self._runtime.cudaHostUnregister(address)
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
        # Wheels rename it: libcudart.so.12, libcudart-1a2b3c4d.so.13. TileLang's libcudart_stub.so is another thing.
        if path and Path(path[0]).name.startswith(("libcudart.", "libcudart-")):
            library = ctypes.CDLL(path[0])
            library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
            return library
    return None
