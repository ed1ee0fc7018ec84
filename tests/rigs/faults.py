"""Faults to plant in the real code: an edge that is not made, a report that comes early, a table overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from layerstream.engine import StreamEngine
from layerstream.jobs import JobKind
from layerstream.ledger import Ledger
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.recording_streams import RecordingEvent, RecordingStream
from layerstream.transfers import Transfer

Plant = Callable[[pytest.MonkeyPatch], Callable[[], int]]
"""Plants a fault; what it returns tells how often the fault has shown."""


def lost_edge(recorder: str, waiter: str, *, first_of_each: bool = False, only: int | None = None) -> Plant:
    """One stream's waits for what another recorded do nothing.

    Args:
        recorder: name of the stream that records the event.
        waiter: name of the stream that is to wait for it.
        first_of_each: of several waits for one event, lose the first and keep the others.
        only: lose just the wait of this number, counted from 0.
    """

    def plant(patch: pytest.MonkeyPatch) -> Callable[[], int]:
        recorded_by: dict[int, tuple[RecordingEvent, str]] = {}
        met: dict[int, RecordingEvent] = {}
        lost = matching = 0
        record, wait = RecordingStream.record, RecordingStream.wait

        def note(stream: RecordingStream, event: RecordingEvent) -> None:
            recorded_by[id(event)] = event, stream.name
            record(stream, event)

        def lose(stream: RecordingStream, event: RecordingEvent) -> None:
            nonlocal lost, matching
            _, by = recorded_by.get(id(event), (event, ""))
            if (by, stream.name) != (recorder, waiter):
                wait(stream, event)
                return
            number, again = matching, id(event) in met
            met[id(event)] = event
            matching += 1
            if (first_of_each and again) or only not in (None, number):
                wait(stream, event)
            else:
                lost += 1

        patch.setattr(RecordingStream, "record", note)
        patch.setattr(RecordingStream, "wait", lose)
        return lambda: lost

    return plant


def early_report(kind: JobKind, at: Callable[[Transfer], bool]) -> Plant:
    """Transfers of a kind are reported as done before they are.

    Args:
        kind: of the jobs.
        at: whether to report one.
    """

    def plant(patch: pytest.MonkeyPatch) -> Callable[[], int]:
        count = 0
        finished, book = Transfer.finished, Ledger._count

        def early(transfer: Transfer) -> bool:
            nonlocal count
            if transfer.kind is not kind:
                return finished(transfer)
            count += 1
            return at(transfer)

        def skip(ledger: Ledger, transfer: Transfer) -> None:
            # Nobody can tell the times of what is not over.
            if transfer.kind is not kind:
                book(ledger, transfer)

        patch.setattr(Transfer, "finished", early)
        patch.setattr(Ledger, "_count", skip)
        return lambda: count

    return plant


def at_once(_: Transfer) -> bool:
    """As soon as it was queued."""
    return True


def when_joined(transfer: Transfer) -> bool:
    """As soon as the KV cache is not read any more."""
    return all(part.joined.done() for part in transfer.parts)


def one_table_for_all(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Every step's ids are uploaded into the same memory."""
    count = 0
    memory: dict[int, torch.Tensor] = {}
    make = RecordingDevice.table

    def upload(device: RecordingDevice, values: Any) -> torch.Tensor:
        nonlocal count
        host = torch.from_numpy(np.array(values, dtype=np.int32))
        if id(device) not in memory:
            memory[id(device)] = make(device, [-1] * 4096)
        table = memory[id(device)][: host.numel()]
        device.tables.set(table, values)
        device.compute().copy(table.view(torch.uint8), host.view(torch.uint8))
        count += 1
        return table

    patch.setattr(RecordingDevice, "table", upload)
    return lambda: count


def late_saves_dropped(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """What no hook saved is not saved at the end of the step either."""
    count = 0
    queue, end_step = StreamEngine._queue_save, StreamEngine.end_step
    ending: set[StreamEngine] = set()

    def end(engine: StreamEngine) -> None:
        ending.add(engine)
        end_step(engine)
        ending.discard(engine)

    def drop(engine: StreamEngine, save: Transfer, layers: tuple[int, ...]) -> None:
        nonlocal count
        if engine in ending and save.parts:
            count += 1
            return
        queue(engine, save, layers)

    patch.setattr(StreamEngine, "end_step", end)
    patch.setattr(StreamEngine, "_queue_save", drop)
    return lambda: count


def hooks_taken_for_granted(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Loads rely on the hooks of every layer, whether or not these ever ran."""
    count = 0
    start = StreamEngine.start_loads

    def trust(engine: StreamEngine, **arguments: Any) -> None:
        nonlocal count
        count += 1
        engine._hooked = bytearray(b"\1" * len(engine._hooked))
        start(engine, **arguments)

    patch.setattr(StreamEngine, "start_loads", trust)
    return lambda: count
