"""What is the staged path's own: its rings, its pieces, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.errors import ConfigError
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, StepPlan
from layerstream.pipeline.base import Move
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.pipeline.staged import StagedPath
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import KERNELS, LAYERS, KnownMemory, job, make_rig


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def test_copies_into_the_ring_do_not_wait_for_the_model(api: FakeCuda) -> None:
    rig = make_rig(api)
    engine = rig.engine
    engine.pool.span(0, 0, 2).fill_(7)
    release = api.hold()
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [4, 5], [0, 1]),)))
    engine.start_loads(layerwise=False)
    api.run()
    ring = rig.path._load_ring._pieces[0].memory  # type: ignore[attr-defined]
    assert ring[:128].tolist() == [7] * 128, "the first copy should have run"
    assert rig.kv[0][4, 0] == -1, "no block may be written before the compute stream's earlier work"
    release()
    api.run()
    assert storage_bytes(rig.kv[0])[4 * 64 : 6 * 64].tolist() == [7] * 128


def test_a_step_joins_the_gathers_and_not_the_copies_to_the_host(api: FakeCuda) -> None:
    rig = make_rig(api)
    engine = rig.engine
    with api.stream(rig.path._save_copy.raw):  # type: ignore[attr-defined]
        release = api.hold()
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [4, 6, 7], [0, 1, 2]),)))
    rig.write(0, [4], 1000)
    engine.save_layer(0)
    engine.end_step()
    rig.write(0, [5], 2000)
    api.run()
    # A piece for each layer and two pieces: the gathers of layers 2 and 3 need pieces that only the held copies free.
    assert rig.kv[0][5, 0] == -1
    assert engine.poll() is None, "nothing is saved before its bytes are in the pool"
    release()
    api.run()
    assert rig.kv[0][5, 0] == 2005
    assert rig.reports().done == {1: 1}
    roomy = make_rig(api, pieces=LAYERS)
    with api.stream(roomy.path._save_copy.raw):  # type: ignore[attr-defined]
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


def test_a_piece_holds_whole_pages_and_cuts_runs() -> None:
    move = Move(range(7), torch.arange(7, dtype=torch.int32), [(10, 2), (40, 5)])
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
            cache=PagedCache(geometry, [storage_bytes(tensor) for tensor in kv.values()]),
            pool=pool,
            kernels=PageKernels(*KERNELS),
            staging_bytes=3 << 20,
        )


def test_a_pool_that_is_not_pinned_is_copied_run_by_run(api: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownMemory, "register", lambda *_: False)
    rig = make_rig(api, group=LAYERS)
    blocks, flat = [4, 9, 2, 7, 11], [30, 31, 50, 7, 8]

    def words(layer: int, page: int) -> torch.Tensor:
        return rig.engine.pool.span(layer, page, 1).view(torch.int64)

    for layer in range(LAYERS):
        for page in flat:
            words(layer, page).fill_(1000 * layer + page)
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, blocks, [(30, 2), 50, (7, 2)]),)))
    rig.engine.start_loads(layerwise=False)
    rig.engine.end_step()
    rig.engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.SAVE, blocks, [(100, 3), (60, 2)]),)))
    rig.engine.end_step()
    api.run()
    assert "copy_batch" not in [entry.call for entry in api.log], "batches need memory that the driver knows"
    for layer in range(LAYERS):
        right = [1000 * layer + page for page in flat]
        assert rig.kv[layer][blocks, 0].tolist() == right
        assert [int(words(layer, page)[0]) for page in (100, 101, 102, 60, 61)] == right
