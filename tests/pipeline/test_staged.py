"""The staged path on CUDA streams that run in any order their events allow: bytes are right in all of them.

Streams and kernels are the fake's, on real bytes. The model's own work is queued on the compute stream too: it writes
the blocks a step saves, overwrites them in the next step, and reads the blocks a step loads. A missing edge lets some
order run a read before its write, or a write before an earlier read, and shows as wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.engine import StreamEngine
from layerstream.errors import ConfigError
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, Report, StepPlan
from layerstream.kernels.reference import gather_pages, scatter_pages
from layerstream.pipeline.base import Move
from layerstream.pipeline.staged import StagedPath
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda, FakeStream

LAYERS, BLOCKS = 4, 32
CHUNK_BLOCKS = 4


@dataclass
class Rig:
    """An engine over fake CUDA streams, and a model that queues its reads and writes on the compute stream."""

    api: FakeCuda
    engine: StreamEngine
    kv: list[torch.Tensor]
    """Per layer `int64[blocks, 8]`."""

    def write(self, layer: int, blocks: list[int], value: int) -> None:
        """Queue the model's write: block b gets `value + b`."""
        index = torch.tensor(blocks)

        def write() -> None:
            self.kv[layer][index] = (value + index)[:, None].expand(-1, 8).clone()

        self.engine.device.compute().launch(self.api.kernel(write))

    def read(self, layer: int, blocks: list[int], into: dict[int, torch.Tensor]) -> None:
        """Queue the model's read of blocks."""
        index = torch.tensor(blocks)

        def read() -> None:
            into[layer] = self.kv[layer][index].clone()

        self.engine.device.compute().launch(self.api.kernel(read))

    def reports(self) -> Report:
        report = self.engine.poll()
        assert report is not None, "nothing was reported"
        return report


def make_rig(api: FakeCuda, *, pieces: int) -> Rig:
    kv = [torch.full((BLOCKS, 8), -1, dtype=torch.int64) for _ in range(LAYERS)]
    geometry = kv_geometry(
        {f"layer.{index}": tensor for index, tensor in enumerate(kv)}, num_blocks=BLOCKS, block_tokens=16
    )
    device = CudaDevice(0, api=api)
    pool = HostPool(page_bytes=[64] * LAYERS, chunk_blocks=CHUNK_BLOCKS, budget_bytes=1 << 20)
    # Pieces of three pages, so that every longer transfer here wraps around its ring.
    with mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 3 * 64):
        path = StagedPath(
            device=device,
            geometry=geometry,
            storages=[storage_bytes(tensor) for tensor in kv],
            pool=pool,
            gather=api.kernel(gather_pages),
            scatter=api.kernel(scatter_pages),
            staging_bytes=2 * pieces * 3 * 64,
        )
    return Rig(api, StreamEngine(device=device, geometry=geometry, pool=pool, path=path), kv)


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def job(job_id: int, kind: JobKind, blocks: list[int], pages: list[int]) -> Job:
    runs = tuple((page, 1) for page in pages)
    return Job(job_id=job_id, kind=kind, request_id="r", block_ids=tuple(blocks), pool_runs=runs)


@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "whole"])
@pytest.mark.parametrize("seed", range(30))
def test_every_order_the_events_allow_moves_the_right_bytes(api: FakeCuda, hooks: bool, seed: int) -> None:
    dice = random.Random(seed)

    def choose(ready: list[FakeStream]) -> FakeStream:
        return dice.choice(ready)

    rig = make_rig(api, pieces=2)
    engine = rig.engine
    source, target = dice.sample(range(16), 10), dice.sample(range(16, 32), 10)
    pages = dice.sample(range(engine.pool.pages), 10)
    # A step computes the source blocks and saves them, and the next step overwrites them.
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, source, pages),)))
    for layer in range(LAYERS):
        engine.wait_layer(layer)
        rig.write(layer, source, 1000 * (layer + 1))
        if hooks:
            engine.save_layer(layer)
    engine.end_step()
    for layer in range(LAYERS):
        rig.write(layer, source, -7_000)
    # The blocks to load into still belong to that step: its writes to them come first.
    for layer in range(LAYERS):
        rig.write(layer, target, -9_000)
    api.run(choose)
    assert rig.reports().done == {1: 1}
    # Loading step, and a step after it that hands the target blocks on.
    for layer in range(LAYERS):
        rig.write(layer, target, -8_000)
    seen: dict[int, torch.Tensor] = {}
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, target, pages),)))
    engine.start_loads(layerwise=hooks)
    for layer in range(LAYERS):
        if hooks:
            engine.wait_layer(layer)
        rig.read(layer, target, seen)
    engine.end_step()
    for layer in range(LAYERS):
        rig.write(layer, target, -5_000)
    api.run(choose)
    assert rig.reports().done == {2: 1}
    for layer in range(LAYERS):
        want = torch.tensor([1000 * (layer + 1) + block for block in source])
        assert torch.equal(seen[layer], want[:, None].expand(-1, 8)), f"layer {layer}"
        assert torch.equal(rig.kv[layer][torch.tensor(target)][:, 0], torch.tensor(target) - 5_000)


def test_loads_and_saves_of_one_step_do_not_mix(api: FakeCuda) -> None:
    rig = make_rig(api, pieces=2)
    engine = rig.engine
    for seed in range(10):
        dice = random.Random(seed)
        engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [1, 2, 3, 4], [0, 1, 2, 3]),)))
        for layer in range(LAYERS):
            rig.write(layer, [1, 2, 3, 4], 100 * layer)
        engine.end_step()
        both = (job(2, JobKind.LOAD, [20, 21, 22, 23], [0, 1, 2, 3]), job(3, JobKind.SAVE, [5, 6], [4, 5]))
        api.run(dice.choice)
        rig.reports()
        engine.begin_step(StepPlan(step=2, jobs=both))
        engine.start_loads(layerwise=False)
        for layer in range(LAYERS):
            rig.write(layer, [5, 6], 10_000 * (layer + 1))
        engine.end_step()
        for layer in range(LAYERS):
            rig.write(layer, [5, 6], -1)
        api.run(dice.choice)
        assert rig.reports().done == {2: 1, 3: 1}
        for layer in range(LAYERS):
            assert rig.kv[layer][20:24, 0].tolist() == [100 * layer + block for block in (1, 2, 3, 4)]
            stored = engine.pool.span(layer, 4, 2).view(torch.int64)[::8]
            assert stored.tolist() == [10_000 * (layer + 1) + 5, 10_000 * (layer + 1) + 6]


def test_the_host_never_waits(api: FakeCuda) -> None:
    """The fake fails on `synchronize`, and nothing queued runs before the test says so."""
    rig = make_rig(api, pieces=2)
    engine = rig.engine
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, list(range(16)), list(range(16))),)))
    engine.end_step()
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, list(range(16)), list(range(16))),)))
    engine.start_loads(layerwise=False)
    engine.end_step()
    assert engine.poll() is None
    api.run()
    assert rig.reports().done == {1: 1, 2: 1}


def test_copies_into_the_ring_do_not_wait_for_the_model(api: FakeCuda) -> None:
    rig = make_rig(api, pieces=2)
    engine = rig.engine
    engine.pool.span(0, 0, 2).fill_(7)
    release = api.hold()
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [4, 5], [0, 1]),)))
    engine.start_loads(layerwise=False)
    api.run()
    ring = engine._path._load_ring._pieces[0].memory  # type: ignore[attr-defined]
    assert ring[:128].tolist() == [7] * 128, "the first copy should have run"
    assert rig.kv[0][4, 0] == -1, "no block may be written before the compute stream's earlier work"
    release()
    api.run()
    assert storage_bytes(rig.kv[0])[4 * 64 : 6 * 64].tolist() == [7] * 128


def test_a_step_joins_the_gathers_and_not_the_copies_to_the_host(api: FakeCuda) -> None:
    rig = make_rig(api, pieces=2)
    engine = rig.engine
    with api.stream(engine._path._save_copy._raw):  # type: ignore[attr-defined]
        release = api.hold()
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [4], [0]),)))
    rig.write(0, [4], 1000)
    engine.save_layer(0)
    engine.end_step()
    rig.write(0, [5], 2000)
    api.run()
    # One page a layer and two pieces: the gathers of layers 2 and 3 need pieces that only the held copies free.
    assert rig.kv[0][5, 0] == -1
    assert engine.poll() is None, "nothing is saved before its bytes are in the pool"
    release()
    api.run()
    assert rig.kv[0][5, 0] == 2005
    assert rig.reports().done == {1: 1}
    roomy = make_rig(api, pieces=LAYERS)
    with api.stream(roomy.engine._path._save_copy._raw):  # type: ignore[attr-defined]
        release = api.hold()
    roomy.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [4], [0]),)))
    roomy.engine.end_step()
    roomy.write(0, [5], 2000)
    api.run()
    assert roomy.kv[0][5, 0] == 2005, "with room in the ring the step waits for no copy to the host"
    assert roomy.engine.poll() is None
    release()
    api.run()
    assert roomy.reports().done == {1: 1}


@pytest.mark.parametrize("seed", range(8))
def test_a_layer_that_does_not_run_in_a_step_is_gated_for_later_ones(api: FakeCuda, seed: int) -> None:
    rig = make_rig(api, pieces=2)
    engine = rig.engine
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.pool.span(LAYERS - 1, 0, 1).fill_(3)
    engine.begin_step(StepPlan(step=2, jobs=(job(1, JobKind.LOAD, [4], [0]),)))
    engine.start_loads(layerwise=True)
    for layer in range(LAYERS - 1):
        engine.wait_layer(layer)
    engine.end_step()
    seen: dict[int, torch.Tensor] = {}
    rig.read(LAYERS - 1, [4], seen)
    api.run(random.Random(seed).choice)
    assert set(seen[LAYERS - 1].view(torch.uint8).flatten().tolist()) == {3}


def test_a_piece_holds_whole_pages_and_cuts_runs() -> None:
    move = Move(torch.arange(7, dtype=torch.int32), [(10, 2), (40, 5)])
    pieces = move.pieces(3)
    assert [piece.pages for piece in pieces] == [3, 3, 1]
    assert [piece.pool_runs for piece in pieces] == [((10, 2), (40, 1)), ((41, 3),), ((44, 1),)]
    assert torch.equal(torch.cat([piece.blocks for piece in pieces]), move.blocks)
    assert move.pieces(3) is pieces
    assert [piece.pages for piece in move.pieces(100)] == [7]


def test_staging_too_small_for_a_page_is_refused(api: FakeCuda) -> None:
    kv = {"layer.0": torch.zeros(4, 1 << 20, dtype=torch.uint8)}
    geometry = kv_geometry(kv, num_blocks=4, block_tokens=16)
    pool = HostPool(page_bytes=[1 << 20], chunk_blocks=1, budget_bytes=4 << 20)
    with pytest.raises(ConfigError, match=r"3 MiB cannot stage pages of 1048576 bytes; set it to at least 4"):
        StagedPath(
            device=CudaDevice(0, api=api),
            geometry=geometry,
            storages=[storage_bytes(tensor) for tensor in kv.values()],
            pool=pool,
            gather=gather_pages,
            scatter=scatter_pages,
            staging_bytes=3 << 20,
        )
