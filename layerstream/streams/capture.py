"""Capturing a stream: which calls may be kept, and what their events need when they are made again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from layerstream.errors import TransferError
from layerstream.streams.base import Event
from layerstream.streams.copies import check_batch, check_copy, kept

P = ParamSpec("P")


class Call(NamedTuple):
    """One call of a stream's method."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallGraph:
    """A `Graph` as the calls that made it. It keeps what they were given alive."""

    __slots__ = ("calls", "records", "waits")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self.records: list[Event] = []
        """Events that the graph records, each once."""
        self.waits: list[Event] = []
        """Events it waits for before it has recorded them itself: a replay needs them recorded by others."""
        for call in calls:
            if call.method == "record":
                _add(self.records, call.args[0])
            elif call.method == "wait" and not any(call.args[0] is event for event in self.records):
                _add(self.waits, call.args[0])


class Capture:
    """What a device is capturing, if anything. Shared by its streams, each of which shows every call to it."""

    __slots__ = ("_calls", "_name", "stream")

    def __init__(self) -> None:
        self.stream: object | None = None
        """What identifies the stream that is being captured; None while there is none."""
        self._name = ""
        self._calls: list[Call] = []

    def keep(self, stream: object, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Keep a call, which comes from `stream` while something is being captured.

        Raises:
            TransferError: another stream is being captured, or the call cannot be captured.
        """
        if stream != self.stream:
            raise TransferError(
                f"{method} on another stream while stream {self._name!r} is captured; a capture may use that one alone"
            )
        if method in {"record", "wait"} and not args[0].in_graph:
            raise TransferError(
                f"{method} of an ordinary event while stream {self._name!r} is captured; make it with "
                "event(in_graph=True)"
            )
        if method == "replay":
            raise TransferError(f"a graph cannot be replayed inside the capture of stream {self._name!r}")
        if method == "copy":
            check_copy(self._name, *args)
        if method == "copy_batch":
            check_batch(self._name, args[0])
            args = (kept(args[0]),)
        self._calls.append(Call(method, args, kwargs))

    def refuse(self, what: str) -> None:
        """Raise if something is being captured, as `what` cannot be.

        Raises:
            TransferError: something is.
        """
        if self.stream is not None:
            raise TransferError(f"{what} while stream {self._name!r} is captured; make it before the capture")

    def run(self, stream: object, name: str, queue: Callable[[], None]) -> CallGraph:
        """Call `queue` and keep what it does with `stream`, which is called `name` in messages.

        Raises:
            TransferError: something is being captured already, or `queue` did what cannot be captured.
        """
        self.refuse("another capture begun")
        self.stream, self._name, self._calls = stream, name, []
        try:
            queue()
            return CallGraph(self._calls)
        finally:
            self.stream, self._calls = None, []


class _Capturable(Protocol):
    _capture: Capture


S = TypeVar("S", bound=_Capturable)


def capturable(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """A stream's method that is kept, instead of called, while its device captures (`stream._capture`)."""
    name = method.__name__

    @functools.wraps(method)
    def call(stream: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if stream._capture.stream is None:
            method(stream, *args, **kwargs)
        else:
            stream._capture.keep(stream, name, *args, **kwargs)

    return call


def check_timing(start: Event, end: Event) -> None:
    """Refuse to tell the time between two events that have none.

    Raises:
        TransferError: one of them is not done, follows a failure, or was made with `in_graph`.
    """
    if start.in_graph or end.in_graph:
        raise TransferError("events made with in_graph=True have no timing; ask for the time between ordinary ones")
    if not (start.done() and end.done()):
        raise TransferError("time was asked between events of which one is not done; ask done() first")


def _add(events: list[Event], event: Event) -> None:
    if not any(event is known for known in events):
        events.append(event)
