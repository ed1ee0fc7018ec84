"""Breaks between pieces: how a hook inside a module is called, so that it also runs where the rest is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstream.graphs.capture import GraphApi


class Muted:
    """A run of the module that does no step's work: its hooks have nothing to do."""

    def reach(self, call: Callable[[], None]) -> None:
        """Pass a hook by."""


class Pieces(Muted):
    """The parts of one capture: replays of graphs, and hooks between them."""

    def __init__(self, api: GraphApi) -> None:
        self.parts: list[Callable[[], None]] = []
        self.breaks = 0
        self._api = api
        self._graph = api.begin()

    def reach(self, call: Callable[[], None]) -> None:
        """Put a hook between the piece that ends here and the next."""
        self.end()
        self.parts.append(call)
        self.breaks += 1
        self._graph = self._api.begin()

    def end(self) -> None:
        """End the piece at hand."""
        self._api.end(self._graph)
        self.parts.append(self._graph.replay)


class Whole(Pieces):
    """A capture in one graph: a hook runs once, in the capture, and what it queues becomes part of the graph."""

    def reach(self, call: Callable[[], None]) -> None:
        """Run a hook as part of the graph."""
        call()
        self.breaks += 1


_running: ContextVar[Muted | None] = ContextVar("layerstream_piecewise", default=None)


def run_eagerly(call: Callable[[], None]) -> None:
    """Run `call` here in every forward, captured or not: the way a hook must be called inside a module.

    While a `PiecewiseModule` captures, `call` is not run: it becomes a break between two graphs, and runs in each
    replay. It sees the stream that the replay is queued on as the current one. In a capture of one whole graph it runs
    then and there, and in no replay.
    """
    if (running := _running.get()) is None:
        call()
    else:
        running.reach(call)


@contextmanager
def run_into(run: Muted) -> Iterator[None]:
    """Hand what reaches `run_eagerly` to `run`."""
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)
