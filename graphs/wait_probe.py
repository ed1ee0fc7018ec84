"""Finds out what CUDA's documents leave open: when a captured wait looks at its event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from layerstream.errors import TransferTimeout

if TYPE_CHECKING:
    from layerstream.graphs.in_graph import ValueDriver
    from layerstream.streams.base import Device

HANG_S = 10.0
"""Seconds after which the device is taken to be stuck."""


def captured_waits(
    device: Device, driver: ValueDriver, *, patience_s: float = 0.2, pause: Callable[[float], None] = time.sleep
) -> Literal["live", "launch"]:
    """Whether a captured wait holds for the event's latest record when it is reached, or when its graph is launched.

    A graph that only waits is launched behind a closed word; then the event is recorded behind a second one, and the
    first is opened. If the graph ends while the second is still closed, it did not see the later record. Blocks the
    host for up to `patience_s`: once, at start, on a device that is otherwise idle.

    Raises:
        TransferTimeout: the device ran neither; `EventGates` cannot be used on it.
        TransferError: something was refused.
    """
    runner, recorder = (device.stream(f"layerstream-probe-{part}", priority=0) for part in ("graph", "event"))
    # Opened by the host: a stream that opened one might share a queue of the device with the stream that waits.
    start, release = (torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2))
    event, ended = device.event(in_graph=True), device.event()
    recorder.record(event)
    runner.wait(event)
    graph = device.capture(runner, lambda: runner.wait(event))
    handles = [int(cast(Any, stream).raw.cuda_stream) for stream in (runner, recorder)]
    driver.wait_value(handles[0], start.data_ptr(), 1)
    runner.replay(graph)
    runner.record(ended)
    driver.wait_value(handles[1], release.data_ptr(), 1)
    recorder.record(event)
    start.fill_(1)
    passed = _comes(ended.done, patience_s, pause)
    release.fill_(1)
    if not _comes(lambda: ended.done() and event.done(), HANG_S, pause):
        raise TransferTimeout(
            f"a graph that waits for an event did not end in {HANG_S:g} s though the event was recorded; do not use "
            'in_graph_waits: "events" on this device'
        )
    return "launch" if passed else "live"


def _comes(done: Callable[[], bool], seconds: float, pause: Callable[[float], None]) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        pause(1e-3)
    return True
