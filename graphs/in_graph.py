"""Waits for single layers inside a CUDA graph of the whole forward. Experimental, and off unless asked for.

No hook runs in a FULL graph, but a wait can be captured into it: while the graph is captured, each layer's hook calls
`capture_wait`, which adds a node before the layer's attention. A step without a load finds every node open and queues
nothing. A step with one arms the gates, queues its load with an `open` for each layer, launches the graph, and ends
with `end_step`. All that the graph waits for must be queued before it is launched: work queued later may share a
hardware queue with the graph, behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch

if TYPE_CHECKING:
    from layerstream.streams.base import Device, Event, Stream


class InGraphGates(Protocol):
    """Gates of one model's layers, numbered from 0 in the order the model runs them."""

    def capture_wait(self, layer: int) -> None:
        """Add the layer's wait to the graph that the compute stream is capturing."""

    def captured_whole(self) -> bool:
        """Whether there was a capture, and each one so far had every layer, once and in order."""

    def try_arm(self, compute: Stream) -> bool:
        """Close the gates for the step whose load is about to be submitted; call it before the load's `after` event is
        recorded on `compute`. False: this step must wait for its whole load, and nothing was queued."""

    def open(self, layer: int, done: Event) -> None:
        """Let the layer's wait pass once `done` has, the end of the layer's load. In an armed step, before the graph is
        launched, once for each layer."""

    def end_step(self, compute: Stream) -> None:
        """The armed step's graph is queued, or will not be: call it in any case. A layer that was not opened holds
        nothing up from here on."""


class ValueDriver(Protocol):
    """The calls of the CUDA driver that wait for and write a 32-bit word (`layerstream.streams.driver.CudaDriver`)."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Keep the stream behind the word's being `value`."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Queue a write of `value`."""


class _Captures:
    """Whether captures were whole. One that lacks a layer shows by the order of what follows, or at the end."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._next = 0
        self._whole = 0
        self._broken = False

    def see(self, layer: int) -> None:
        if layer != self._next:
            self._broken = True
        self._next = (layer + 1) % self._layers
        self._whole += self._next == 0

    def whole(self) -> bool:
        return self._whole > 0 and self._next == 0 and not self._broken


class FlagGates:
    """A word in device memory per layer: 0 is open. The captured node waits for 0 (`cuStreamWaitValue32`).

    Steps in flight cannot mistake each other's words. Let N be an armed step and M any step before it:

    - N closes the words on the compute stream, so after every node of M's graph has passed: M does not wait for N.
    - `end_step` of M makes the compute stream wait for M's last write of 0, so it comes before N's words are closed:
      M's write does not open N's gate, even if M's graph was never launched.
    - N's write of 0 follows `done`, and both follow the closing by an event, so a node of N that finds 0 finds N's own.
    - A step that is not armed finds 0: the last armed step before it has joined its writes.

    The order between a write and a node is one of memory, unknown to CUDA. Nothing that the writes depend on is queued
    behind the graph, so no schedule of the device can lock.
    """

    def __init__(self, device: Device, layers: int, driver: ValueDriver) -> None:
        """
        Args:
            device: a CUDA device, or what stands in for one: its streams have `raw.cuda_stream`.
            layers: of the model.
            driver: waits and writes.
        """
        self._driver = driver
        self._captures = _Captures(layers)
        self._layers = layers
        self._device = device
        self._stream = device.stream("layerstream-gates", priority=1)
        self._words = device.empty(4 * layers)
        self._closed = _bytes(device.table([1] * layers))
        device.compute().copy(self._words, _bytes(device.table([0] * layers)))
        self._waiting: set[int] = set()
        self._armed = False

    def capture_wait(self, layer: int) -> None:
        """See `InGraphGates.capture_wait`.

        Raises:
            TransferError: the driver refused.
        """
        self._driver.wait_value(_handle(self._device.compute()), self._address(layer), 0)
        self._captures.see(layer)

    def captured_whole(self) -> bool:
        """See `InGraphGates.captured_whole`."""
        return self._captures.whole()

    def try_arm(self, compute: Stream) -> bool:
        """See `InGraphGates.try_arm`. One copy inside the device."""
        if not self.captured_whole():
            return False
        if self._armed:
            self.end_step(compute)
        self._armed = True
        self._waiting = set(range(self._layers))
        compute.copy(self._words, self._closed)
        closed = self._device.event()
        compute.record(closed)
        self._stream.wait(closed)
        return True

    def open(self, layer: int, done: Event) -> None:
        """See `InGraphGates.open`."""
        self._stream.wait(done)
        self._open(layer)

    def _open(self, layer: int) -> None:
        self._waiting.discard(layer)
        self._driver.write_value(_handle(self._stream), self._address(layer), 0)

    def end_step(self, compute: Stream) -> None:
        """See `InGraphGates.end_step`."""
        if not self._armed:
            return
        self._armed = False
        for layer in sorted(self._waiting):
            self._open(layer)
        written = self._device.event()
        self._stream.record(written)
        compute.wait(written)

    def _address(self, layer: int) -> int:
        return int(self._words.data_ptr()) + 4 * layer


class EventGates:
    """An event per layer that a load records anew. The captured node waits for it (`cudaEventWaitExternal`).

    CUDA's documents do not say which record such a node waits for: the latest when its graph is launched, or when the
    node is reached. If the latter ("live"), a graph still running would wait for the events of the next step's load,
    which waits for that graph: a deadlock, whether or not the graph's own step was armed. So unless the device is known
    to look at launch, gates are armed only when the host sees that the compute stream has nothing left to run, which
    asks without waiting; else the step waits for its whole load.
    """

    def __init__(
        self,
        device: Device,
        layers: int,
        *,
        waits: Literal["live", "launch"] = "live",
        idle: Callable[[Stream], bool] | None = None,
    ) -> None:
        """
        Args:
            device: makes events that may be captured.
            layers: of the model.
            waits: when a captured node looks at its event (`layerstream.graphs.wait_probe`); "live" is right for both.
            idle: whether a stream has run all that was queued on it; never blocks. A CUDA stream's own query by
                default.
        """
        self._device = device
        self._captures = _Captures(layers)
        self._live = waits == "live"
        self._idle = idle or _has_run_all
        self._stream = device.stream("layerstream-gates", priority=1)
        self._opened = [device.event(in_graph=True) for _ in range(layers)]
        for event in self._opened:
            self._stream.record(event)

    def capture_wait(self, layer: int) -> None:
        """See `InGraphGates.capture_wait`."""
        self._device.compute().wait(self._opened[layer])
        self._captures.see(layer)

    def captured_whole(self) -> bool:
        """See `InGraphGates.captured_whole`."""
        return self._captures.whole()

    def try_arm(self, compute: Stream) -> bool:
        """See `InGraphGates.try_arm`. Queues nothing."""
        return self.captured_whole() and not (self._live and not self._idle(compute))

    def open(self, layer: int, done: Event) -> None:
        """See `InGraphGates.open`."""
        self._stream.wait(done)
        self._stream.record(self._opened[layer])

    def end_step(self, compute: Stream) -> None:
        """See `InGraphGates.end_step`. A layer that was not opened still has an older record, which has passed."""


def _handle(stream: Stream) -> int:
    return int(cast(Any, stream).raw.cuda_stream)


def _has_run_all(stream: Stream) -> bool:
    return bool(cast(Any, stream).raw.query())


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.uint8)
