"""What the connector costs a step in which it has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.backends import open_device, open_path
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.streams.cpu import CpuDevice
from profiles.microbench.counting import CountingDevice
from profiles.microbench.results import Results, Row, Target
from profiles.microbench.rig import (
    BLOCK_TOKENS,
    FUSED_HEAD,
    KV_HEADS,
    LAYER_NAMES,
    LAYERS,
    drain,
    kv_tensors,
    run_step,
)

BLOCKS = 8


@pytest.fixture
def counted() -> Iterator[tuple[StreamEngine, CountingDevice]]:
    tensors = kv_tensors(BLOCKS)
    device = CountingDevice(CpuDevice())
    geometry = kv_geometry(tensors, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    pool = HostPool(page_bytes=[layer.page_bytes for layer in geometry.layers], chunk_blocks=2, budget_bytes=64 << 20)
    path = open_path(
        "staged",
        device=device,
        cache=PagedCache(geometry, [storage_bytes(tensor) for tensor in tensors.values()]),
        pool=pool,
        kernels=open_device(torch.device("cpu"))[2],
        staging_bytes=64 << 20,
    )
    paths = PathChoice(loads=[(0, path)], save=path)
    engine = StreamEngine(device=device, geometry=geometry, pool=pool, paths=paths, layers_per_gate=1)
    yield engine, device
    assert engine.close(10.0)


def test_stream_operations_of_an_idle_step(counted: tuple[StreamEngine, CountingDevice], results: Results) -> None:
    engine, device = counted
    # Steps with work come first: the count must see them, and an idle step after them must be as idle as any.
    for step, kind in enumerate((JobKind.SAVE, JobKind.LOAD), 1):
        run_step(engine, kind, range(BLOCKS), step=step)
        assert device.counts["copy"] >= LAYERS * step
        drain(engine)
    before = device.counts.total()
    run_step(engine)
    assert engine.poll() is None
    added = device.counts.total() - before
    results.add(
        Row(
            name="stream operations added in an idle step",
            samples=[added],
            digits=0,
            target=Target(relation="=", value=0),
            note="counted on a wrapped device: records, waits, copies, launches and table uploads",
        )
    )
    assert added == 0


def test_full_decode_graphs_are_kept(results: Results) -> None:
    from layerstream.hooks.vllm.connector import LayerStreamConnector

    kept = not LayerStreamConnector.requires_piecewise_for_cudagraph({})
    assert LayerStreamConnector.requires_piecewise_for_cudagraph({"require_piecewise": True})
    results.add(
        Row(
            name="FULL decode graphs kept (1: yes)",
            samples=[int(kept)],
            digits=0,
            target=Target(relation="=", value=1),
            note="the connector's default answer to vLLM leaves FULL graphs on",
        )
    )
    assert kept


def _worker_connector() -> Any:
    """The connector as a worker holds it, over real KV tensors."""
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from layerstream.hooks.vllm.connector import LayerStreamConnector
    from layerstream.hooks.vllm.register import NAME, register

    register()
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=FUSED_HEAD // 2, dtype=torch.bfloat16
    )
    transfer = KVTransferConfig(kv_connector=NAME, kv_role="kv_both", kv_connector_extra_config={"host_gib": 0.1})
    connector = LayerStreamConnector(
        VllmConfig(kv_transfer_config=transfer),
        KVConnectorRole.WORKER,
        KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYER_NAMES), spec)]
        ),
    )
    connector.register_kv_caches(kv_tensors(BLOCKS))
    return connector


def test_hooks_of_a_step_without_work(benchmark: Any, results: Results) -> None:
    from layerstream.hooks.vllm.messages import StepMetadata

    connector = _worker_connector()
    assert connector.worker.engine is not None
    connector.bind_connector_metadata(StepMetadata(None))
    layers = [(name, None) for name in LAYER_NAMES]

    def hooks() -> None:
        for name, kv_layer in layers:
            connector.wait_for_layer_load(name)
            connector.save_kv_layer(name, kv_layer, None)

    benchmark.pedantic(hooks, rounds=300, iterations=20, warmup_rounds=20)
    connector.shutdown()
    results.add(
        Row(
            name="both hooks of a layer without work",
            unit="us",
            scale=1e6,
            digits=2,
            target=Target(relation="<", value=2e-6),
            samples=[seconds / LAYERS for seconds in benchmark.stats.stats.data],
            note=f"host time of wait_for_layer_load and save_kv_layer of the connector, each sample 20 steps of "
            f"{LAYERS} layers; vLLM's own decorator around them is not ours and not in it",
        )
    )
