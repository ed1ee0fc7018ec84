"""What `PiecewiseModule` needs of a device to capture graphs, and CUDA's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch


class Piece(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Queue it on the current stream."""


class GraphApi(Protocol):
    """Captures one piece after another; all share one memory pool, so they must replay in the order of capture."""

    def aside(self) -> AbstractContextManager[None]:
        """Where warm-up and capture happen: a stream of its own, behind what is queued on the current one and before
        what will be."""

    def begin(self) -> Piece:
        """Begin a piece: what is queued from here on is kept and not run."""

    def end(self, piece: Piece) -> None:
        """End the piece begun last; it can be replayed from here on."""

    def abandon(self) -> None:
        """End a capture that failed, if one is open. Never raises."""


class CudaGraphs:
    """See `GraphApi`."""

    def __init__(self, api: Any = None) -> None:
        """
        Args:
            api: `torch.cuda` unless given.
        """
        self._api = torch.cuda if api is None else api
        self._pool = self._api.graph_pool_handle()
        self._stream = self._api.Stream()
        self._open: Any = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `GraphApi.aside`."""
        # A tensor or a graph that the collector frees during a capture would end it.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        current = self._api.current_stream()
        self._stream.wait_stream(current)
        try:
            with self._api.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
            if collecting:
                gc.enable()

    def begin(self) -> Piece:
        """See `GraphApi.begin`."""
        piece = self._api.CUDAGraph()
        # Other threads may make memory while this one captures: they are not part of it.
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = piece
        return piece  # type: ignore[no-any-return]

    def end(self, piece: Piece) -> None:
        """See `GraphApi.end`."""
        self._open = None
        piece.capture_end()  # type: ignore[attr-defined]

    def abandon(self) -> None:
        """See `GraphApi.abandon`."""
        piece, self._open = self._open, None
        if piece is not None:
            with suppress(RuntimeError):
                piece.capture_end()


def graph_api_for(device: torch.device) -> GraphApi | None:
    """What captures on `device`; None where there are no graphs."""
    return CudaGraphs() if device.type == "cuda" else None
