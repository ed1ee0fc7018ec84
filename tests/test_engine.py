"""The worker half on the CPU device: steps, hooks in every order, bytes, reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.engine import StreamEngine
from layerstream.errors import TransferError, VerifyError
from layerstream.jobs import JobKind, StepPlan
from layerstream.kernels import reference
from layerstream.kernels.stack import PageStack
from layerstream.timeline import read_timeline
from layerstream.transfers import Transfer
from tests.rigs.engine_rig import (
    BLOCKS,
    LAYERS,
    TOKENS,
    job,
    kv_tensors,
    make_engine,
    replace_kernel,
    reports,
    run_step,
)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return kv_tensors()


@pytest.fixture
def engine(tensors: dict[str, torch.Tensor]) -> Iterator[StreamEngine]:
    engine = make_engine(tensors)
    yield engine
    assert engine.close(10.0)


@pytest.mark.parametrize("hooks", [True, False], ids=["hooks run", "no hook runs"])
def test_saved_blocks_come_back_byte_for_byte(
    engine: StreamEngine, tensors: dict[str, torch.Tensor], hooks: bool
) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run_step(engine, job(1, JobKind.SAVE, [3, 7, 4, 9], (2, 3), (9, 1)), hooks=hooks)
    assert reports(engine, 1).done == {1: 1}
    for tensor in tensors.values():
        tensor[torch.tensor([3, 7, 4, 9])] = -1.0
    run_step(engine, job(2, JobKind.LOAD, [20, 21, 22, 23], (2, 3), (9, 1)), hooks=hooks)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[20:24], before[name][torch.tensor([3, 7, 4, 9])])
        untouched = [b for b in range(BLOCKS) if b not in (3, 7, 4, 9, 20, 21, 22, 23)]
        assert torch.equal(tensor[torch.tensor(untouched)], before[name][torch.tensor(untouched)])
    report = reports(engine, 2)
    assert report.done == {2: 1}
    assert report.stats.load_blocks == 4
    assert report.stats.load_bytes == 4 * engine.geometry.block_bytes
    assert report.stats.gated_load_seconds > 0
    expected = ("layerwise" if hooks else "whole", report.stats.load_seconds, report.stats.stall_seconds)
    assert report.loads == (expected,)


def test_a_gate_waits_for_its_own_layer_and_no_other(
    engine: StreamEngine, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step(engine, job(1, JobKind.SAVE, [0, 1], (0, 2)))
    reports(engine, 1)
    want = {name: tensor[:2].clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[:2] = -1.0
    may_arrive = [threading.Event() for _ in range(LAYERS)]

    def held(stack: PageStack, first: int, layers: int, src: torch.Tensor, blocks: torch.Tensor) -> None:
        assert may_arrive[first].wait(20.0), "a gate waits for a later layer"
        reference.scatter_layers(stack, first, layers, src, blocks)

    replace_kernel(monkeypatch, engine, "scatter_layers", held)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [0, 1], (0, 2)),)))
    engine.start_loads(layerwise=True)
    for layer, (name, tensor) in enumerate(tensors.items()):
        threading.Timer(0.01, may_arrive[layer].set).start()
        engine.wait_layer(layer)
        assert torch.equal(tensor[:2], want[name]), name
        assert all(bool((later[:2] == -1).all()) for later in list(tensors.values())[layer + 1 :])
        engine.save_layer(layer)
    engine.end_step()


def test_hooks_may_run_twice_and_in_any_order(engine: StreamEngine, tensors: dict[str, torch.Tensor]) -> None:
    want = {name: tensor[5].clone() for name, tensor in tensors.items()}
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [5], (0, 1)),)))
    for layer in (2, 0, 2, 4, 0):
        engine.wait_layer(layer)
        engine.save_layer(layer)
    assert engine._save is not None
    assert [part.layers for part in engine._save.parts] == [(2,), (0,), (4,)]
    engine.end_step()
    reports(engine, 1)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [6], (0, 1)),)))
    engine.start_loads(layerwise=True)
    gates: list[object] = []
    for layer in (3, 1, 3, 1):
        engine.wait_layer(layer)
        assert engine._gated is not None
        gates.append(engine._gated.part_of[layer].gate)
    assert gates[:2] == gates[2:], "a gate is passed once"
    engine.end_step()
    for name, tensor in tensors.items():
        assert torch.equal(tensor[6], want[name])


def test_a_parked_load_arrives_without_any_gate(engine: StreamEngine, tensors: dict[str, torch.Tensor]) -> None:
    want = {name: tensor[2].clone() for name, tensor in tensors.items()}
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    reports(engine, 1)
    run_step(engine, job(2, JobKind.PARKED_LOAD, [8], (4, 1)))
    report = reports(engine, 2)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[8], want[name])
    assert report.stats.load_blocks == 1
    assert report.stats.gated_load_seconds == 0
    assert report.loads == (("parked", report.stats.load_seconds, None),)


def test_a_gate_whose_load_was_not_started_is_an_error(engine: StreamEngine) -> None:
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [8], (4, 1), request="late-one"),)))
    with pytest.raises(TransferError, match=r"late-one.*not started before the forward"):
        engine.wait_layer(0)


def test_a_layerwise_step_whose_hooks_do_not_run_is_an_error(engine: StreamEngine) -> None:
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    run_step(engine)
    engine.begin_step(StepPlan(step=3, jobs=(job(2, JobKind.LOAD, [8], (4, 1), request="blind"),)))
    engine.start_loads(layerwise=True)
    with pytest.raises(TransferError, match=r"blind.*no layer hook ran"):
        engine.end_step()


def test_before_any_hook_was_seen_loads_are_waited_for_whole(
    engine: StreamEngine, tensors: dict[str, torch.Tensor]
) -> None:
    want = {name: tensor[2].clone() for name, tensor in tensors.items()}
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)), hooks=False)
    reports(engine, 1)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [8], (4, 1)),)))
    engine.start_loads(layerwise=True)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[8], want[name])
    engine.end_step()


def test_a_step_without_work_touches_no_stream(engine: StreamEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("a stream was used")

    for name in ("compute", "event", "table", "stream"):
        monkeypatch.setattr(engine.device, name, touched)
    run_step(engine)
    run_step(engine, hooks=False)
    assert engine.poll() is None


def test_every_call_is_harmless_without_a_step(engine: StreamEngine) -> None:
    engine.end_step()
    engine.wait_layer(0)
    engine.save_layer(0)
    engine.start_loads(layerwise=True)
    engine.end_step()
    engine.end_step()
    engine.begin_step(None)
    assert engine.poll() is None


def test_a_failed_save_is_reported_and_the_step_goes_on(engine: StreamEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no such page")

    replace_kernel(monkeypatch, engine, "gather_layers", broken)
    run_step(engine, job(7, JobKind.SAVE, [1], (0, 1)))
    assert reports(engine, 7).failed == {7: 1}


def test_a_failed_load_stops_the_step_and_names_the_request(
    engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no such page")

    run_step(engine, job(1, JobKind.SAVE, [1], (0, 1)))
    replace_kernel(monkeypatch, engine, "scatter_layers", broken)
    with pytest.raises(TransferError, match=r"requests lost did not arrive at layer layer\.0"):
        run_step(engine, job(2, JobKind.LOAD, [1], (0, 1), request="lost"))


def test_verify_sees_a_byte_that_changed_in_the_pool(tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine(tensors, verify=True)
    run_step(engine, job(1, JobKind.SAVE, [2, 3], (4, 2)))
    run_step(engine, job(2, JobKind.LOAD, [8, 9], (4, 2)))
    assert reports(engine, 2).stats.verified_blocks == 4
    engine.pool.span(3, 5, 1)[17] ^= 1
    with pytest.raises(VerifyError, match="request r: block 11 was restored with other bytes than pool page 5"):
        run_step(engine, job(3, JobKind.LOAD, [10, 11], (4, 2)))
    assert engine.close(10.0)


def test_a_gated_load_leaves_its_timeline(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    engine = make_engine(tensors, trace_dir=str(tmp_path / "traces"))
    run_step(engine, job(1, JobKind.SAVE, [2, 3], (4, 2)))
    run_step(engine, job(2, JobKind.LOAD, [8, 9], (4, 2), request="traced"), step=12)
    reports(engine, 2)
    (file,) = (tmp_path / "traces").iterdir()
    timeline = read_timeline(file)
    assert timeline.step == 12
    assert timeline.requests == ("traced",)
    assert [times.layer for times in timeline.layers] == list(tensors)
    for times in timeline.layers:
        assert 0 <= times.load_begin <= times.load_end <= times.gate_end
        assert times.gate_begin <= times.gate_end <= times.compute_end
    assert engine.close(10.0)


def test_a_save_larger_than_the_ring_is_exact(tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine(tensors)
    storage = storage_bytes(next(iter(tensors.values())))
    page = engine.geometry.layers[0].page_bytes
    engine._paths.save._piece_bytes = 2 * page  # type: ignore[attr-defined]
    before = storage.clone()
    blocks = list(range(0, BLOCKS - 1, 2))
    run_step(engine, job(1, JobKind.SAVE, blocks, (1, len(blocks))))
    reports(engine, 1)
    storage.zero_()
    run_step(engine, job(2, JobKind.LOAD, blocks, (1, len(blocks))))
    view = storage.view(LAYERS, BLOCKS, page)
    assert torch.equal(view[:, ::2][:, : len(blocks)], before.view(LAYERS, BLOCKS, page)[:, ::2][:, : len(blocks)])
    assert engine.close(10.0)


def test_verify_sees_wrong_bytes_in_the_cache_though_the_pool_is_right(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tensors, verify=True)
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))

    def beside(stack: PageStack, first: int, layers: int, src: torch.Tensor, blocks: torch.Tensor) -> None:
        reference.scatter_layers(stack, first, layers, src, blocks + 1)

    replace_kernel(monkeypatch, engine, "scatter_layers", beside)
    with pytest.raises(VerifyError, match="block 8 was restored with other bytes"):
        run_step(engine, job(2, JobKind.LOAD, [8], (4, 1)))
    assert engine.close(10.0)


def test_verify_sees_wrong_bytes_in_the_pool_though_the_cache_is_right(tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine(tensors, verify=True)
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    check = engine.verifier.check  # type: ignore[union-attr]

    def damage_then_check(transfers: Sequence[Transfer]) -> int:
        engine.pool.span(0, 4, 1).zero_()
        return check(transfers)

    engine.verifier.check = damage_then_check  # type: ignore[method-assign,union-attr]
    with pytest.raises(VerifyError, match="pool page 4 should hold"):
        run_step(engine, job(2, JobKind.LOAD, [8], (4, 1)))
    assert engine.close(10.0)


def test_a_step_that_was_not_ended_is_ended_by_the_next(engine: StreamEngine, tensors: dict[str, torch.Tensor]) -> None:
    want = {name: tensor[2].clone() for name, tensor in tensors.items()}
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [2], (4, 1)),)))
    engine.begin_step(None)
    assert reports(engine, 1).done == {1: 1}
    run_step(engine, job(2, JobKind.LOAD, [9], (4, 1)))
    for name, tensor in tensors.items():
        assert torch.equal(tensor[9], want[name])


def test_a_timeline_that_cannot_be_written_is_given_up(
    tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tensors, trace_dir=str(tmp_path / "traces"))
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    (tmp_path / "traces").rmdir()
    for number in (2, 3):
        run_step(engine, job(number, JobKind.LOAD, [8], (4, 1)))
        assert reports(engine, number).done[number] == 1
    assert caplog.text.count("no more timelines") == 1
    assert engine.close(10.0)


@pytest.mark.parametrize("group", [1, 2, 3, LAYERS, LAYERS + 3])
@pytest.mark.parametrize("order", [range(LAYERS), (3, 0, 4, 1, 2)], ids=["in order", "out of order"])
def test_layers_that_travel_together_are_exact(
    tensors: dict[str, torch.Tensor], group: int, order: Sequence[int]
) -> None:
    engine = make_engine(tensors, layers_per_gate=group)
    want = {name: tensor[torch.tensor([2, 9])].clone() for name, tensor in tensors.items()}
    for kind, blocks in ((JobKind.SAVE, [2, 9]), (JobKind.LOAD, [20, 11])):
        engine.begin_step(StepPlan(step=1, jobs=(job(kind.value, kind, blocks, (5, 2)),)))
        engine.start_loads(layerwise=True)
        for layer in order:
            engine.wait_layer(layer)
            if kind is JobKind.LOAD:
                name, tensor = list(tensors.items())[layer]
                assert torch.equal(tensor[torch.tensor(blocks)], want[name])
            engine.save_layer(layer)
        engine.end_step()
        assert reports(engine, kind.value).done == {kind.value: 1}
    assert engine.close(10.0)


def test_small_layers_are_grouped_and_large_ones_are_not(tensors: dict[str, torch.Tensor]) -> None:
    page = kv_geometry(tensors, num_blocks=BLOCKS, block_tokens=TOKENS).layers[0].page_bytes
    engine = make_engine(kv_tensors(layers=16), layers_per_gate=None)
    for group_bytes, blocks, size in (
        (0, 1, 1),
        (2 * page, 2, 1),
        (3 * page, 1, 3),
        (3 * page, 2, 2),
        (99 * page, 1, 4),
    ):
        engine._group_bytes = group_bytes
        assert engine._group_size(blocks) == size
    assert engine.close(10.0)


def test_a_step_uploads_one_table(engine: StreamEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    table = engine.device.table

    def spy(values: Sequence[int]) -> torch.Tensor:
        asked.append(list(values))
        return table(values)

    monkeypatch.setattr(engine.device, "table", spy)
    run_step(
        engine,
        job(1, JobKind.PARKED_LOAD, [3], (0, 1)),
        job(2, JobKind.SAVE, [4, 5], (2, 2)),
        job(3, JobKind.LOAD, [6], (1, 1)),
        job(4, JobKind.SAVE, [7], (9, 1)),
    )
    assert asked == [[6, 4, 5, 7, 3]]
    reports(engine, 1, 2, 3, 4)


def test_what_no_hook_saved_is_saved_by_one_launch_for_alike_layers(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tensors)
    launches: list[int] = []

    def spy(dst: torch.Tensor, stack: PageStack, first: int, layers: int, blocks: torch.Tensor) -> None:
        launches.append(layers)
        reference.gather_layers(dst, stack, first, layers, blocks)

    replace_kernel(monkeypatch, engine, "gather_layers", spy)
    run_step(engine, job(1, JobKind.SAVE, [2, 9], (3, 2)), hooks=False)
    reports(engine, 1)
    assert launches == [LAYERS]
    assert engine.close(10.0)
