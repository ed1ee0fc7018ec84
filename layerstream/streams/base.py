"""The device seam: streams, events and memory, so that one engine runs on CUDA, on threads, and under test.

A `Stream` runs what is queued on it in order. Two streams are ordered only through an `Event`: `a.record(e)` marks
what has been queued on `a` so far, `b.wait(e)` keeps what is queued on `b` later behind it. Waiting for an event that
was never recorded is an error here (in CUDA it silently does nothing). Memory is one-dimensional `torch.uint8`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class CopyBatch(NamedTuple):
    """Copies that are queued by one call, by address: row i moves `nbytes[i]` from `sources[i]` to `targets[i]`.

    All three are `uint64[n]`. No two rows may overlap: their order is open. Host memory must be pinned where the device
    is a GPU.
    """

    targets: npt.NDArray[np.uint64]
    sources: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


class Event(Protocol):
    """A point in a stream's work; may be recorded again once nobody waits for the earlier point."""

    in_graph: bool
    """Whether it may be part of captured work (`Device.event`)."""

    def done(self) -> bool:
        """Whether everything before the recorded point has finished. Never blocks.

        Raises:
            TransferError: an operation before the recorded point failed.
        """


class Graph(Protocol):
    """Work captured once, to be queued again as a whole (`Device.capture`, `Stream.replay`)."""


class Stream(Protocol):
    """An ordered queue of device work."""

    name: str

    def record(self, event: Event) -> None:
        """Set `event` to the point after everything queued so far."""

    def wait(self, event: Event) -> None:
        """Start whatever is queued later only after `event`'s point. Blocks no host thread, except that the CPU
        device's compute stream *is* the calling thread."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy between two contiguous byte buffers of equal length (a DMA where one side is the GPU)."""

    def copy_batch(self, batch: CopyBatch) -> None:
        """Queue copies with one call. The arrays may be dropped or changed as soon as it returns.

        Raises:
            TransferError: the arrays are malformed or a row has no bytes, and nothing was queued; or the device refused
                the batch, of which a part may have been queued.
        """

    def replay(self, graph: Graph) -> None:
        """Queue everything `graph` captured, in its order, as one operation of this stream. A wait or a record in it
        acts on its event anew, as if it were queued now.

        Raises:
            TransferError: it waits for an event that was never recorded; nothing was queued.
        """

    def launch(self, kernel: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """Queue `kernel(*args, **kwargs)`. The kernel must use this stream alone and must not block the host."""


class Device(Protocol):
    """Where the KV cache lives. One per worker half; closed once."""

    kind: str
    """"cuda" or "cpu"."""

    def compute(self) -> Stream:
        """The stream the model runs on now (asked anew each step: frameworks may switch it)."""

    def stream(self, name: str, *, priority: int) -> Stream:
        """The stream of that name, which may be the one made before under it. Higher `priority` is scheduled first
        where the device can; 0 is the compute stream's."""

    def event(self, *, in_graph: bool = False) -> Event:
        """A new event, with timing. Only one made with `in_graph` may be recorded or waited for inside `capture`, and
        it has no timing."""

    def capture(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """Keep what `queue()` queues on `stream`, instead of queueing it.

        `queue` may use no other stream, and makes no memory, no table, no event for graphs and no new kernel: on a GPU
        each would end the capture. What the captured work reads and writes must stay in place as long as the graph is
        replayed.

        Raises:
            TransferError: something in `queue` cannot be captured; nothing is being captured any more.
        """

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two events that are done."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory: `uint8[nbytes]`, 256-byte aligned."""

    def table(self, values: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """An `int32` table readable by kernels on any stream that waits for the compute stream; safe to drop at any
        time after the last launch that reads it was queued and its event recorded. Does not block the host."""

    def close(self, timeout_s: float) -> bool:
        """Finish queued work and release streams. False if work was still running after `timeout_s`."""
