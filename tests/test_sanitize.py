"""What the sanitizer declares and when, and the option `sanitize` on the CPU device."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from layerstream.assembly import build_engine, kv_geometry, storage_bytes
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.errors import RaceError
from layerstream.jobs import Job, JobKind, ModelAccess, StepPlan
from layerstream.sanitize import Sanitizer
from layerstream.streams.base import Stream
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.virtual import VirtualDevice
from tests.rigs.faults import lost_edge

LAYERS, BLOCKS = 3, 8
ACCESS = ModelAccess(reads=(4, 1, 5), writes=(5,))


class Told(RecordingDevice):
    """Notes what is declared: (what, reads, writes)."""

    def __init__(self) -> None:
        super().__init__(VirtualDevice())
        self.told: list[tuple[str, list[list[int]], list[list[int]]]] = []

    def declare(self, stream: Stream, *, reads: Any = (), writes: Any = (), what: str) -> None:
        assert stream is self.compute()
        self.told.append((what, np.asarray(reads).tolist(), np.asarray(writes).tolist()))
        super().declare(stream, reads=reads, writes=writes, what=what)

    def taken(self) -> list[str]:
        told, self.told = [what for what, _, _ in self.told], []
        return told


@pytest.fixture
def device() -> Told:
    return Told()


@pytest.fixture
def kv() -> list[torch.Tensor]:
    # Keys and values lie apart: a page is two runs of 32 bytes, 256 bytes from each other.
    return [torch.zeros(2, BLOCKS, 32, dtype=torch.uint8).transpose(0, 1) for _ in range(LAYERS)]


@pytest.fixture
def sanitizer(device: Told, kv: list[torch.Tensor]) -> Sanitizer:
    geometry = kv_geometry({f"l{index}": tensor for index, tensor in enumerate(kv)}, num_blocks=BLOCKS, block_tokens=16)
    return Sanitizer(device, geometry, [storage_bytes(tensor) for tensor in kv])


def of(*layers: int) -> list[str]:
    return [f"{what} of layer l{layer}" for layer in layers for what in ("the model's KV writes", "attention")]


def test_each_layer_is_declared_once_a_step(device: Told, sanitizer: Sanitizer) -> None:
    sanitizer.begin_step((ACCESS,))
    for layer in (0, 0, 1, 0):
        sanitizer.wrote(layer)
        sanitizer.read(layer)
        sanitizer.read(layer)
    assert device.taken() == of(0, 1)
    sanitizer.end_step()
    assert device.taken() == of(2), "a layer whose hooks did not run"
    sanitizer.begin_step((ACCESS,))
    sanitizer.read(0)
    assert device.taken() == of(0), "writes come before reads, also where only those were told"


def test_hooks_may_come_in_any_order(device: Told, sanitizer: Sanitizer) -> None:
    sanitizer.begin_step((ACCESS,))
    for layer in (2, 0, 1):
        sanitizer.wrote(layer)
    for layer in (1, 2, 0):
        sanitizer.read(layer)
    sanitizer.end_step()
    writes, reads = of(0, 1, 2)[::2], of(0, 1, 2)[1::2]
    assert device.taken() == [writes[2], writes[0], writes[1], reads[1], reads[2], reads[0]]


def test_a_full_step_is_declared_at_its_end(device: Told, sanitizer: Sanitizer) -> None:
    sanitizer.begin_step((ACCESS,))
    assert device.taken() == []
    sanitizer.end_step()
    assert device.taken() == of(0, 1, 2)


def test_a_step_whose_model_is_unknown_declares_nothing(device: Told, sanitizer: Sanitizer) -> None:
    sanitizer.begin_step(None)
    sanitizer.wrote(0)
    sanitizer.read(1)
    sanitizer.end_step()
    assert device.taken() == []


def test_nothing_is_declared_after_a_step_or_before_the_first(device: Told, sanitizer: Sanitizer) -> None:
    sanitizer.read(0)
    sanitizer.begin_step((ACCESS,))
    sanitizer.end_step()
    assert device.taken() == of(0, 1, 2)
    sanitizer.wrote(0)
    sanitizer.read(0)
    assert device.taken() == []


def test_every_run_of_the_steps_blocks_is_declared_and_nothing_else(
    device: Told, sanitizer: Sanitizer, kv: list[torch.Tensor]
) -> None:
    sanitizer.begin_step((ACCESS,))
    sanitizer.read(1)
    (_, no_reads, writes), (_, reads, no_writes) = device.told
    base = kv[1].untyped_storage().data_ptr()

    def bytes_of(*blocks: int) -> set[int]:
        return {
            base + half * BLOCKS * 32 + block * 32 + byte for half in (0, 1) for block in blocks for byte in range(32)
        }

    def covered(ranges: list[list[int]]) -> set[int]:
        return {address for start, end in ranges for address in range(start, end)}

    assert (no_reads, no_writes) == ([], [])
    assert covered(writes) == bytes_of(5)
    assert covered(reads) == bytes_of(1, 4, 5)


def test_a_race_names_the_layer(device: Told, sanitizer: Sanitizer, kv: list[torch.Tensor]) -> None:
    other = device.stream("other", priority=0)
    other.copy(storage_bytes(kv[2])[4 * 32 : 5 * 32], torch.zeros(32, dtype=torch.uint8))
    sanitizer.begin_step((ACCESS,))
    sanitizer.end_step()
    (race,) = device.races
    assert race.memory == "KV of layer l2 + 0x80"
    assert (race.first.stream, race.second.what, race.nbytes) == ("other", "attention of layer l2", 32)


# The option, as an engine has it.


@pytest.fixture
def engine() -> Iterator[StreamEngine]:
    tensors = {f"l{index}": torch.arange(BLOCKS * 64.0).view(BLOCKS, 64) + index for index in range(LAYERS)}
    options = {"host_gib": 0.001, "chunk_tokens": 32, "staging_mib": 1, "layers_per_gate": 1, "sanitize": True}
    engine = build_engine(tensors, num_blocks=BLOCKS, block_tokens=16, config=StreamConfig.from_extra(options))
    yield engine
    assert engine.close(10.0)


def step(engine: StreamEngine, number: int, kind: JobKind, blocks: tuple[int, ...], *, writes: bool = False) -> None:
    job = Job(job_id=number, kind=kind, request_id="r", block_ids=blocks, pool_runs=((0, len(blocks)),))
    model = ModelAccess(reads=blocks, writes=blocks if writes else ())
    engine.begin_step(StepPlan(step=number, jobs=(job,), model=(model,)))
    if kind is JobKind.LOAD:
        engine.start_loads(layerwise=True)
    for layer in range(LAYERS):
        engine.wait_layer(layer)
        engine.save_layer(layer)
    engine.end_step()


def wait_for(engine: StreamEngine, job_id: int) -> None:
    deadline = time.monotonic() + 20
    while (report := engine.poll()) is None or job_id not in report.done:
        assert time.monotonic() < deadline, "not reported"


def test_steps_whose_work_is_ordered_raise_nothing(engine: StreamEngine) -> None:
    for number in range(1, 9, 2):
        step(engine, number, JobKind.SAVE, (1, 2, 3), writes=True)
        wait_for(engine, number)
        step(engine, number + 1, JobKind.LOAD, (4, 5, 6))
    assert isinstance(engine.device, RecordingDevice)
    assert engine.device.races == []
    assert not engine.device.undeclared


def test_a_gate_that_is_skipped_is_an_error_that_names_both_sides(
    engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(engine, 1, JobKind.SAVE, (1, 2, 3), writes=True)
    wait_for(engine, 1)
    monkeypatch.setattr(StreamEngine, "_pass_gates", lambda *_: None)
    with pytest.raises(RaceError) as caught:
        step(engine, 2, JobKind.LOAD, (4, 5, 6))
    assert re.match(
        r"race on 768 bytes from KV of layer l0 \+ 0x400: "
        r"launch of scatter_pages on stream 'layerstream-load' writes at pipeline/zero_copy\.py:\d+; "
        r"attention of layer l0 on stream 'compute' reads at layerstream/sanitize\.py:\d+; no event orders them",
        str(caught.value),
    )


def test_a_save_that_was_not_joined_is_an_error_in_the_next_step(
    engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        lost_edge("layerstream-save", "compute")(patch)
        step(engine, 1, JobKind.SAVE, (1, 2, 3))
    with pytest.raises(RaceError, match=r"launch of gather_pages .* reads .*the model's KV writes of layer l0"):
        step(engine, 2, JobKind.SAVE, (1, 2, 3), writes=True)


def test_what_the_model_touches_is_needed_to_see_it(engine: StreamEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamEngine, "_pass_gates", lambda *_: None)
    job = Job(job_id=1, kind=JobKind.LOAD, request_id="r", block_ids=(4,), pool_runs=((0, 1),))
    engine.begin_step(StepPlan(step=1, jobs=(job,)))
    engine.start_loads(layerwise=True)
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
