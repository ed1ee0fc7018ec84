"""Tables of block ids on a GPU: neither their memory nor the host's buffers are used again too early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import torch

from layerstream.streams.cuda import CudaDevice
from profiles.gpu_validate.bench import HANG_S, Bench, delay_on
from profiles.gpu_validate.ordering import judged
from profiles.gpu_validate.rows import Row
from profiles.gpu_validate.scenes import DELAY_S


def tables_outlive_their_readers(bench: Bench) -> Iterator[Row]:
    """The memory of a dropped table is given away only after its last reader."""
    found = [tables_differ(bench, forget=forget) for forget in (False, True)]
    yield judged("law 9: a table's memory is used again once it was read", *found)


def tables_differ(bench: Bench, *, forget: bool) -> list[str]:
    """Whether a delayed copy of a dropped table found other ids in it."""
    device, delay = CudaDevice(bench.place.index or 0), delay_on(bench)
    stream, count = device.stream("reads", priority=0), 4096
    patched = mock.patch.object(torch.Tensor, "record_stream") if forget else nullcontext()
    with patched:
        table = device.table(list(range(count)))
        uploaded = device.event()
        device.compute().record(uploaded)
        stream.wait(uploaded)
        copied = torch.empty(count, dtype=torch.int32, device=bench.place)
        stream.launch(delay, DELAY_S)
        stream.launch(copy, copied, table)
        del table
        others = [device.table([-1] * count) for _ in range(8)]
        bench.finish()
    wrong = (
        [] if torch.equal(copied.cpu(), torch.arange(count, dtype=torch.int32)) else ["ids of a later table were read"]
    )
    del others
    device.close(HANG_S)
    return wrong


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """A kernel that copies."""
    dst.copy_(src, non_blocking=True)


def uploads_are_not_overwritten(bench: Bench) -> Iterator[Row]:
    """The host writes no pinned buffer whose copy has not run."""
    found = [uploads_differ(bench, one_buffer=one_buffer) for one_buffer in (False, True)]
    yield judged("law 9: a table's host buffer is used again once it was copied", *found)


def uploads_differ(bench: Bench, *, one_buffer: bool) -> list[str]:
    """Which of several tables, uploaded behind a delay, hold other values than they were made of."""
    device, delay = CudaDevice(bench.place.index or 0), delay_on(bench)
    device.table([0])
    bench.finish()
    if one_buffer:
        only = device._upload_buffer(64)
        mock.patch.object(device, "_upload_buffer", return_value=only).start()
    device.compute().launch(delay, DELAY_S)
    begun = time.perf_counter()
    tables = [device.table([number] * 64) for number in range(8)]
    took = time.perf_counter() - begun
    bench.finish()
    wrong = [f"table {number}" for number, table in enumerate(tables) if not bool((table == number).all())]
    if took > DELAY_S / 2 and not one_buffer:
        wrong.append(f"making tables blocked the host for {took * 1e3:.0f} ms")
    device.close(HANG_S)
    return wrong
