"""Stand-ins for what a growing host pool waits for: the system's memory, and the registration of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

PATIENCE_S = 20.0
"""Turns a hang into a failure."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for other threads to make `condition` true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


POOL_THREADS = ("layerstream-touch", "layerstream-pin")
"""How the names of a pool's threads begin."""


def own_threads() -> list[str]:
    """Names of the threads that work for a pool."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(POOL_THREADS))


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Those that were there before belong to another test, which said what is wrong itself."""
    before = set(threading.enumerate())
    yield
    until(lambda: not any(thread.name.startswith(POOL_THREADS) for thread in set(threading.enumerate()) - before))


class FakePinner:
    """Registers in name only: refuses from the `refuse_from`-th call on, and `hold` keeps calls from returning."""

    def __init__(self, *, refuse_from: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.registered: dict[int, int] = {}
        self.threads: set[str] = set()
        self._refuse_from = refuse_from
        self._go = threading.Semaphore(0)
        self._held = False

    def hold(self) -> None:
        """From here on each call waits for a `let`."""
        self._held = True

    def let(self, calls: int = 1) -> None:
        for _ in range(calls):
            self._go.release()

    def register(self, address: int, nbytes: int) -> bool:
        assert nbytes > 0
        self.threads.add(threading.current_thread().name)
        self.calls.append((address, nbytes))
        call = len(self.calls)
        if self._held:
            assert self._go.acquire(timeout=PATIENCE_S), "nobody let the call return"
        if self._refuse_from is not None and call >= self._refuse_from:
            return False
        self.registered[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]


class FakeMemory:
    """In place of `first_touch.populate`: gives `free` pieces, and then waits for `give`, or raises `error`."""

    def __init__(self, free: int = 1 << 30, error: OSError | None = None) -> None:
        self.asked: list[int] = []
        """Addresses, in the order of the calls."""
        self.given: list[int] = []
        self.in_use: set[bool] = set()
        self._error = error
        self._go = threading.Semaphore(free)

    def give(self, pieces: int = 1) -> None:
        self._go.release(pieces)

    def populate(self, memory: npt.NDArray[np.uint8], *, in_use: bool) -> bool:
        self.asked.append(memory.ctypes.data)
        self.in_use.add(in_use)
        if not self._go.acquire(timeout=0.0 if self._error is not None else PATIENCE_S):
            assert self._error is not None, "nobody gave the memory"
            raise self._error
        self.given.append(memory.ctypes.data)
        return True
