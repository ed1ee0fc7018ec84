"""What every check is given: the device, how much time is left, and ways to delay and to time a device's streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from layerstream.errors import TransferTimeout
from profiles.gpu_validate.rows import Target

HANG_S = 30.0
"""What is not done after so long hangs."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """One process's place to measure."""

    place: torch.device
    quick: bool
    """Few rounds and small sizes."""
    deadline: float
    """On `time.monotonic`: what is left to do then is left out."""
    out: Path
    """Folder for pictures."""

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.place.type == "cuda"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def finish(self) -> None:
        """Wait for everything queued on the device."""
        if self.cuda:
            torch.cuda.synchronize(self.place)

    def for_gpu(self, relation: Literal["<=", ">=", "<", "="], value: float) -> Target | None:
        """A target that only a GPU has to reach."""
        return Target(relation=relation, value=value) if self.cuda else None

    def sized(self, full: int, quick: int) -> int:
        """`full` in a full run on a GPU, else `quick`."""
        return full if self.cuda and not self.quick else quick

    @property
    def rounds(self) -> int:
        """Pairs of a comparison: enough to be judged, unless the run is a quick one."""
        return self.sized(10, 2)

    def free_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(torch.cuda.mem_get_info(self.place)[0])

    def device_seconds(self, queue: Callable[[], object]) -> float:
        """Time that what `queue` queues on the current stream takes, without the host's time to queue it."""
        if not self.cuda:
            begun = time.perf_counter()
            queue()
            return time.perf_counter() - begun
        start, end = timing_event(), timing_event()
        # Everything queues behind this.
        spin(0.01)
        start.record()
        queue()
        end.record()
        wait_for(end.query)
        return max(float(start.elapsed_time(end)) / 1e3, 1e-9)


def timing_event() -> Any:
    """A `torch.cuda.Event` with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait_for(done: Callable[[], bool], seconds: float = HANG_S) -> None:
    """Wait for something that ends on its own.

    Raises:
        TransferTimeout: it did not.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TransferTimeout(f"something queued on the device was not done after {seconds:g} s")
        time.sleep(2e-5)


_cycles: list[float] = []


def _cycles_per_second() -> float:
    """Rate of the counter that `torch.cuda._sleep` waits on, once the clocks are up."""
    if not _cycles:
        for count in (20_000_000, 20_000_000):
            start, end = timing_event(), timing_event()
            start.record()
            torch.cuda._sleep(count)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
            _cycles[:] = [count / (float(start.elapsed_time(end)) / 1e3)]
    return _cycles[0]


def prepare_spin(bench: Bench) -> None:
    """Measure the clock, which waits for the device, before anything relies on not waiting."""
    if bench.cuda:
        _cycles_per_second()


def spin(seconds: float) -> None:
    """Keep the current stream of the GPU busy on one multiprocessor. Queued like any kernel."""
    torch.cuda._sleep(int(seconds * _cycles_per_second()))  # type: ignore[no-untyped-call]


def delay_on(bench: Bench) -> Callable[[float], None]:
    """A kernel that takes as long as it is told, for `Stream.launch`."""
    prepare_spin(bench)
    return spin if bench.cuda else time.sleep


def host_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Host time of each call."""
    times = []
    for call in calls:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return times
