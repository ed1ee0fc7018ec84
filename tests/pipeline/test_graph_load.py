"""Loads submitted as one captured graph: bytes, sizes, what is uploaded and queued."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.backends import open_path
from layerstream.engine import StreamEngine
from layerstream.errors import ConfigError
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.graph_load import GraphLoad
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.streams.base import Device
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import BLOCKS, KERNELS, LAYERS, KnownMemory, Rig, accepting_host_memory, job


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def graph_rig(
    api: FakeCuda,
    *,
    sizes: tuple[int, ...] = (4, 16),
    segment_bytes: int = 1 << 13,
    max_ctas: int | None = None,
    accepting: Callable[[Callable[..., None]], Callable[..., None]] = accepting_host_memory,
) -> Rig:
    """As `make_rig`, with loads by graph. Pool pages lie in many segments. `accepting` wraps the kernels."""
    kv = [torch.full((BLOCKS, 8), -1, dtype=torch.int64) for _ in range(LAYERS)]
    geometry = kv_geometry({f"layer.{i}": tensor for i, tensor in enumerate(kv)}, num_blocks=BLOCKS, block_tokens=16)
    device = CudaDevice(0, api=api)
    pool = HostPool(
        page_bytes=[64] * LAYERS, chunk_blocks=4, budget_bytes=1 << 16, segment_bytes=segment_bytes, pin=KnownMemory()
    )
    shared = {
        "device": device,
        "cache": PagedCache(geometry, [storage_bytes(tensor) for tensor in kv]),
        "pool": pool,
        "kernels": PageKernels(*(api.kernel(accepting(kernel)) for kernel in KERNELS)),
    }
    path = open_path("staged", staging_bytes=1 << 14, **shared)  # type: ignore[arg-type]
    with mock.patch("layerstream.kernels.operands.HOST_LAUNCH_BYTES", 3 * 64):
        graph = GraphLoad(sizes=sizes, max_ctas=max_ctas, **shared)  # type: ignore[arg-type]
    paths = PathChoice(loads=[(0, path)], save=path)
    engine = StreamEngine(device=device, geometry=geometry, pool=pool, paths=paths, layers_per_gate=1, graph_load=graph)
    api.run()
    return Rig(api, engine, kv, path)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("seed", range(10))
def test_every_order_moves_the_right_bytes_twice_in_a_row(api: FakeCuda, count: int, seed: int) -> None:
    dice = random.Random(seed)
    rig = graph_rig(api)
    engine = rig.engine
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    wanted: list[tuple[list[int], list[int]]] = []
    seen: list[dict[int, torch.Tensor]] = [{}, {}]
    for step in range(2):
        target, pages = dice.sample(range(BLOCKS), count), dice.sample(range(engine.pool.pages), count)
        wanted.append((target, pages))
        for layer in range(LAYERS):
            for page in pages:
                engine.pool.span(layer, page, 1).view(torch.int64).fill_(1000 * layer + page)
            rig.write(layer, target, -8_000)
        # Two steps in flight: nothing runs between them.
        engine.begin_step(StepPlan(step=step, jobs=(job(step, JobKind.LOAD, target, pages),)))
        engine.start_loads(layerwise=True)
        for layer in range(LAYERS):
            engine.wait_layer(layer)
            rig.read(layer, target, seen[step])
        engine.end_step()
        for layer in range(LAYERS):
            rig.write(layer, target, -5_000)
    api.run(dice.choice)
    assert rig.reports().done == {0: 1, 1: 1}
    for step, (target, pages) in enumerate(wanted):
        for layer in range(LAYERS):
            want = torch.tensor([1000 * layer + page for page in pages])[:, None].expand(-1, 8)
            assert torch.equal(seen[step][layer], want), f"step {step}, layer {layer}"
            if step:
                assert rig.kv[layer][torch.tensor(target), 0].tolist() == [block - 5_000 for block in target]


def test_a_load_is_one_upload_and_one_replay(api: FakeCuda) -> None:
    rig = graph_rig(api)
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [1, 2, 3], [5, 6, 90]),)))
    api.log.clear()
    rig.engine.start_loads(layerwise=True)
    calls = [entry.call for entry in api.log]
    assert calls.count("replay") == 1
    assert calls.count("copy") == 2, "the upload, and the tables' way into place"
    assert calls.count("launch") == 0
    rig.engine.end_step()
    api.run()
    assert rig.reports().stats.load_blocks == 3


def test_a_load_larger_than_every_graph_takes_the_ordinary_path(api: FakeCuda) -> None:
    rig = graph_rig(api, sizes=(2, 4))
    blocks = list(range(5))
    for layer in range(LAYERS):
        rig.engine.pool.span(layer, 0, 5).fill_(9)
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, blocks, blocks),)))
    rig.engine.start_loads(layerwise=False)
    assert "replay" not in [entry.call for entry in api.log]
    rig.engine.end_step()
    api.run()
    assert rig.reports().done == {1: 1}
    assert all((tensor[:5].view(torch.uint8) == 9).all() for tensor in rig.kv)


def test_a_load_as_large_as_the_largest_graph_is_captured_too(api: FakeCuda) -> None:
    rig = graph_rig(api, sizes=(2, 4))
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [1, 2, 3, 4], [5, 6, 7, 8]),)))
    rig.engine.start_loads(layerwise=False)
    assert "replay" in [entry.call for entry in api.log]


def test_captured_launches_say_that_they_cross_the_link_and_keep_their_limit(api: FakeCuda) -> None:
    told: list[tuple[object, object]] = []

    def accepting(kernel: Callable[..., None]) -> Callable[..., None]:
        def accept(*args: Any, packed_on_host: bool = False, max_ctas: int | None = None, **options: Any) -> None:
            told.append((packed_on_host, max_ctas))
            kernel(*args, **options)

        accept.__name__ = kernel.__name__
        return accept

    rig = graph_rig(api, max_ctas=3, accepting=accepting)
    assert told
    assert set(told) == {(True, 3)}
    told.clear()
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [1], [5]),)))
    rig.engine.start_loads(layerwise=False)
    rig.engine.end_step()
    api.run()
    assert set(told) == {(True, 3)}


def test_pages_of_several_sizes_are_refused() -> None:
    tensors = {"a": torch.zeros(4, 16), "b": torch.zeros(4, 32)}
    geometry = kv_geometry(tensors, num_blocks=4, block_tokens=1)
    device: Device = CpuDevice()
    pool = HostPool(page_bytes=[64, 128], chunk_blocks=1, budget_bytes=1 << 16)
    with pytest.raises(ConfigError, match=r"pages of this model are of 2 sizes \(\[64, 128\] bytes\)"):
        GraphLoad(
            device=device,
            cache=PagedCache(geometry, [storage_bytes(tensor) for tensor in tensors.values()]),
            pool=pool,
            kernels=PageKernels(*KERNELS),
        )
    assert device.close(5.0)
