"""Which parts an engine is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerstream import assembly, backends
from layerstream.assembly import _open_paths, build_engine, kv_geometry, storage_bytes
from layerstream.config import StreamConfig
from layerstream.errors import ConfigError, GeometryError
from layerstream.graphs.in_graph import EventGates, FlagGates
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.kernels import reference
from layerstream.kernels.stack import PageStack
from layerstream.pipeline.graph_load import GraphLoad
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.rate_table import PathRate, RateTable
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import KERNELS, KnownMemory, accepting_host_memory

REFERENCE = PageKernels(
    reference.gather_pages, reference.scatter_pages, reference.gather_layers, reference.scatter_layers
)
TENSORS = {"layer": torch.zeros(4, 2, 16)}


class Kind:
    """A device and a pool of which only what decides about paths is there."""

    def __init__(self, kind: str, *, pinned: bool) -> None:
        self.kind = kind
        self.pinned = pinned


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are names, and this machine's calibration is known."""
    rates = [
        PathRate(path=path, direction="load", page_bytes=128, blocks=blocks, seconds=seconds)
        for path, blocks, seconds in (
            ("staged", 4, 1.0),
            ("staged", 64, 1.0),
            ("zero_copy", 4, 0.5),
            ("batch_dma", 64, 0.5),
        )
    ]
    table = RateTable(device="a GPU", software={}, roofs={}, rates=tuple(rates))
    monkeypatch.setattr(assembly, "open_path", lambda name, **parts: SimpleNamespace(name=name, **parts))
    monkeypatch.setattr(assembly, "machine_rates", lambda place, page_bytes, folder: table)


def paths_of(asked: str, kind: str, *, pinned: bool) -> tuple[str, str, str]:
    """Names of the paths of a small load, of a large load, and of saves."""
    config = StreamConfig.from_extra({"transfer_path": asked})
    device: Any = Kind(kind, pinned=pinned)
    cache: Any = PagedCache(kv_geometry(TENSORS, num_blocks=4, block_tokens=2), [storage_bytes(TENSORS["layer"])])
    paths = _open_paths(device, cache, device, REFERENCE, config)
    return paths.load(1).name, paths.load(1000).name, paths.save.name


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("asked", "kind", "pinned", "paths"),
    [
        ("auto", "cpu", False, ("zero_copy", "zero_copy", "zero_copy")),
        ("staged", "cpu", False, ("staged", "staged", "staged")),
        ("batch_dma", "cpu", False, ("batch_dma", "batch_dma", "batch_dma")),
        ("auto", "cuda", True, ("zero_copy", "batch_dma", "staged")),
        ("staged", "cuda", True, ("staged", "staged", "staged")),
        ("zero_copy", "cuda", True, ("zero_copy", "zero_copy", "staged")),
        ("batch_dma", "cuda", True, ("batch_dma", "batch_dma", "staged")),
        ("auto", "cuda", False, ("staged", "staged", "staged")),
        ("zero_copy", "cuda", False, ("staged", "staged", "staged")),
    ],
)
def test_paths_follow_option_device_pinning_and_calibration(
    asked: str, kind: str, pinned: bool, paths: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert paths_of(asked, kind, pinned=pinned) == paths
    refused = kind == "cuda" and not pinned and asked != "auto"
    assert ("needs a pinned host pool" in caplog.text) is refused


@pytest.mark.usefixtures("opened")
def test_without_a_calibration_loads_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "machine_rates", lambda place, page_bytes, folder: None)
    assert paths_of("auto", "cuda", pinned=True) == ("staged", "staged", "staged")


@pytest.mark.parametrize(("path", "name"), [("auto", "zero_copy"), ("staged", "staged"), ("batch_dma", "batch_dma")])
def test_a_cpu_engine_has_the_path_it_was_asked_for(path: str, name: str) -> None:
    config = StreamConfig.from_extra({"host_gib": 0.001, "transfer_path": path, "staging_mib": 1})
    engine = build_engine(TENSORS, num_blocks=4, block_tokens=2, config=config)
    assert engine._paths.save.name == engine._paths.load(3).name == name
    assert engine.close(5.0)


def test_a_cpu_engine_queues_whole_loads_before_the_forward() -> None:
    tensors = {f"layer.{index}": torch.zeros(4, 2, 16) for index in range(12)}
    config = StreamConfig.from_extra({"host_gib": 0.001, "layers_per_gate": 1})
    engine = build_engine(tensors, num_blocks=4, block_tokens=2, config=config)
    for layer in range(12):
        engine.wait_layer(layer)
    job = Job(job_id=1, kind=JobKind.LOAD, request_id="r", block_ids=(1,), pool_runs=((0, 1),))
    engine.begin_step(StepPlan(step=1, jobs=(job,)))
    engine.start_loads(layerwise=True)
    assert engine._gated is not None and len(engine._gated.parts) == 12
    for layer in range(12):
        engine.wait_layer(layer)
    engine.end_step()
    assert engine.close(5.0)


def test_a_device_without_streams_is_named() -> None:
    tensors = {"layer": torch.zeros(4, 2, 16, device="meta")}
    with pytest.raises(GeometryError, match="'meta' devices cannot be streamed; only cuda and cpu can"):
        build_engine(tensors, num_blocks=4, block_tokens=2, config=StreamConfig.from_extra({"host_gib": 0.001}))


def test_geometry_keeps_the_order_of_the_layers() -> None:
    storage = torch.zeros(2, 4, 8)
    geometry = kv_geometry({"b": storage[1], "a": storage[0]}, num_blocks=4, block_tokens=2)
    assert [layer.name for layer in geometry.layers] == ["b", "a"]
    assert [layer.offset for layer in geometry.layers] == [128, 0]
    assert dataclasses.asdict(geometry)["block_tokens"] == 2


def test_portable_tiers_need_an_engine_that_says_what_its_pages_hold(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": str(tmp_path), "gib": 1, "portable": True}
    config = StreamConfig.from_extra({"host_gib": 0.001, "chunk_tokens": 2, "tiers": [tier]})
    with pytest.raises(ConfigError, match="which KV heads its tensors hold; turn the option portable off"):
        build_engine(TENSORS, num_blocks=4, block_tokens=2, config=config)


def test_a_trace_folder_that_cannot_be_made_is_one_clear_error(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="trace_dir: /proc/no/such cannot be made"):
        build_engine(
            TENSORS,
            num_blocks=4,
            block_tokens=2,
            config=StreamConfig.from_extra({"host_gib": 0.001, "trace_dir": "/proc/no/such"}),
        )


def test_kernels_are_warmed_up_once_a_layout_and_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[str, list[int]]] = []

    def gather(dst: torch.Tensor, stack: PageStack, first: int, layers: int, blocks: torch.Tensor) -> None:
        warmed.append(("gather", blocks.tolist()))
        REFERENCE.gather_layers(dst, stack, first, layers, blocks)

    def scatter(stack: PageStack, first: int, layers: int, src: torch.Tensor, blocks: torch.Tensor) -> None:
        warmed.append(("scatter", blocks.tolist()))
        REFERENCE.scatter_layers(stack, first, layers, src, blocks)

    monkeypatch.setattr(reference, "gather_layers", gather)
    monkeypatch.setattr(reference, "scatter_layers", scatter)
    tensors = {"a": torch.ones(4, 2, 16), "b": torch.ones(4, 2, 16), "wider": torch.ones(4, 2, 32)}
    config = StreamConfig.from_extra({"host_gib": 0.001})
    engine = build_engine(tensors, num_blocks=4, block_tokens=2, config=config)
    assert warmed == 2 * [("gather", [-1]), ("scatter", [-1])]
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    assert engine.close(5.0)


class Refusing(KnownMemory):
    """The system pins nothing."""

    def register(self, address: int, nbytes: int) -> bool:
        return False


class GpuAssembly:
    """Builds engines as on a GPU, of the stand-in's streams, pinning and kernels."""

    def __init__(self, api: FakeCuda, patch: pytest.MonkeyPatch) -> None:
        self.api, self._patch = api, patch
        self.pinner: KnownMemory = KnownMemory()
        self.tensors = {f"layer.{index}": torch.zeros(4, 2, 16) for index in range(8)}

    def build(self, *, rank: int = 0, **options: object) -> Any:
        kernels = PageKernels(*(self.api.kernel(accepting_host_memory(kernel)) for kernel in KERNELS))
        parts = (CudaDevice(0, api=self.api), self.pinner, kernels)
        self._patch.setattr(assembly, "open_device", lambda _: parts)
        extra = {"host_gib": 0.001, "transfer_path": "staged", "staging_mib": 2, **options}
        config = StreamConfig.from_extra(extra)
        return build_engine(self.tensors, num_blocks=4, block_tokens=2, config=config, rank=rank)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuAssembly]:
    with FakeCuda() as api:
        yield GpuAssembly(api, monkeypatch)


def test_options_reach_the_parts_of_a_gpu_engine(gpu: GpuAssembly) -> None:
    engine = gpu.build(graph_loads=True, max_copy_sms=3, rank=4)
    assert isinstance(engine._graph_load, GraphLoad)
    assert engine._graph_load._options["max_ctas"] == 3
    assert engine._paths.save._limits == {"max_ctas": 3}
    pieces = engine._paths.save._load_ring._pieces
    assert sum(piece.memory.numel() for piece in pieces) == 1 << 20
    assert engine._group_bytes == backends.GROUP_BYTES["cuda"]
    assert engine._ledger._rank == 4
    assert engine.in_graph is None


def test_without_a_pinned_pool_no_load_is_captured(gpu: GpuAssembly) -> None:
    gpu.pinner = Refusing()
    assert gpu.build(graph_loads=True)._graph_load is None


@pytest.mark.parametrize("waits", ["live", "launch"])
def test_waits_in_graphs_are_of_the_kind_asked_for(
    gpu: GpuAssembly, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(gpu.build(in_graph_waits="flags").in_graph, FlagGates)
    monkeypatch.setattr(assembly, "captured_waits", lambda *_: waits)
    gates = gpu.build(in_graph_waits="events").in_graph
    assert isinstance(gates, EventGates)
    assert gates._live is (waits == "live")


def test_the_largest_page_decides_about_paths(gpu: GpuAssembly, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(assembly, "machine_rates", lambda place, page_bytes, folder: asked.append(page_bytes))
    gpu.tensors = {"narrow": torch.zeros(4, 2, 16), "wide": torch.zeros(4, 2, 32)}
    gpu.build(transfer_path="auto")
    assert asked == [256]


def test_the_pool_lies_near_the_gpu(gpu: GpuAssembly, monkeypatch: pytest.MonkeyPatch) -> None:
    near: list[object] = []

    def spy(**parts: Any) -> Any:
        near.append(parts["cores"])
        return HostPool(**parts)

    monkeypatch.setattr(assembly, "memory_cores", lambda _: [0])
    monkeypatch.setattr(assembly, "HostPool", spy)
    gpu.build()
    assert near == [[0]]


def test_kernels_that_read_the_pool_are_warmed_up_too(gpu: GpuAssembly) -> None:
    gpu.build()
    assert {"gather_pages", "scatter_pages"} <= {entry.what for entry in gpu.api.log if entry.call == "launch"}
