"""Start-up of the connector: registration, options, engines it does not support, what vLLM asks of the class."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from layerstream.errors import ConfigError, GeometryError
from layerstream.hooks.vllm.compat import cache_groups, hooks_tell_layers, unsupported
from layerstream.hooks.vllm.connector import LayerStreamConnector
from layerstream.hooks.vllm.identify import namespace_of
from layerstream.hooks.vllm.register import NAME, register
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, vllm_config

OPTIONS = {"host_gib": 0.002, "staging_mib": 1}


def cache_config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"group{index}.layer"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)


def windowed(block_size: int = BLOCK, tokens: int = 32) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=tokens
    )


def chunked() -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32, attention_chunk_size=32
    )


def sinks() -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32, sink_len=BLOCK)


def state() -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,))


def mixed(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={f"layer{number}": spec for number, spec in enumerate(specs)}
    )


def make(folder: Path, options: dict[str, Any], role: KVConnectorRole, cache: KVCacheConfig) -> LayerStreamConnector:
    return LayerStreamConnector(vllm_config(folder, options, 8, 64, True), role, cache)


def test_registering_twice_is_harmless_and_the_name_leads_to_the_class() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is LayerStreamConnector


def test_what_vllm_asks_of_the_class(tmp_path: Path) -> None:
    assert supports_hma(LayerStreamConnector)
    assert LayerStreamConnector.requires_piecewise_for_cudagraph({}) is False
    assert LayerStreamConnector.requires_piecewise_for_cudagraph({"require_piecewise": True}) is True
    connector = make(tmp_path, OPTIONS, KVConnectorRole.SCHEDULER, cache_config(full()))
    assert connector.requires_kv_delivery is False
    assert connector.get_finished_count() is None


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_wrong_option_is_one_error_in_every_process(tmp_path: Path, role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match=r"'host_gb'.*'host_gib'"):
        make(tmp_path, {"host_gb": 4}, role, cache_config(full()))


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (cache_config(full(), state()), "a KV cache group is MambaSpec; FullAttentionSpec, MLAAttentionSpec, Sliding"),
        (cache_config(sinks()), "a KV cache group is SinkFullAttentionSpec; FullAttentionSpec, MLA"),
        (cache_config(mixed(full(), sinks())), "a KV cache group is SinkFullAttentionSpec"),
        (cache_config(full(), windowed(2 * BLOCK)), "blocks of 16, 32 tokens, hashed every None and hit every None"),
        (cache_config(chunked()), "all its attention is chunked"),
        (cache_config(chunked(), windowed(tokens=1)), "sees no token but its own"),
        (cache_config(), "no KV cache group in which prefixes are cached"),
    ],
    ids=[
        "state",
        "sinks",
        "sinks among others",
        "blocks of two sizes",
        "chunks alone",
        "windows of one token",
        "no group",
    ],
)
def test_an_unsupported_engine_runs_as_without_the_connector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: KVCacheConfig, reason: str
) -> None:
    config = vllm_config(tmp_path, OPTIONS, 8, 64, True)
    assert unsupported(config, cache) is not None
    scheduler = LayerStreamConnector(config, KVConnectorRole.SCHEDULER, cache)
    assert [record for record in caplog.records if record.levelname == "WARNING"], "it must be said"
    with pytest.raises(AssertionError):
        scheduler.worker  # noqa: B018 - reading it is the test
    worker = LayerStreamConnector(config, KVConnectorRole.WORKER, cache)
    worker.register_kv_caches({"group0.layer": torch.zeros(8, 4)})
    assert worker.get_handshake_metadata() is None
    assert scheduler.get_num_new_matched_tokens(None, 0) == (0, False)
    assert scheduler.reset_cache() is True
    assert scheduler.has_pending_push_work() is False
    worker.wait_for_layer_load("group0.layer")
    worker.wait_for_save()
    worker.shutdown()
    scheduler.shutdown()
    assert re.search(reason, unsupported(config, cache) or "")


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_not_supported(tmp_path: Path, field: str) -> None:
    config = vllm_config(tmp_path, OPTIONS, 8, 64, True)
    setattr(config.parallel_config, field, 2)
    assert unsupported(config, cache_config(full())) == f"{field} is 2; only 1 is supported"


def test_a_layer_that_is_not_registered_is_named(tmp_path: Path) -> None:
    worker = make(tmp_path, OPTIONS, KVConnectorRole.WORKER, cache_config(full()))
    with pytest.raises(GeometryError, match=r"group0\.layer.*were not registered"):
        worker.register_kv_caches({"another": torch.zeros(8, 4)})


def test_groups_are_taken_together_in_the_order_of_the_model(tmp_path: Path) -> None:
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    ring = CircularBufferSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    cache = cache_config(full(), ring, windowed(), mixed(full(), latent))
    names = [["m.0.a", "m.10.a"], ["m.1.ring"], ["m.1.a", "m.9.a"], ["m.2.a"]]
    for group, its in zip(cache.kv_cache_groups, names, strict=True):
        group.layer_names = its
    config = vllm_config(tmp_path, OPTIONS, 8, 64, True)
    assert unsupported(config, cache) is None
    groups = cache_groups(cache)
    assert groups.ids == (0, 2, 3), "a ring is no KV of a prefix"
    assert groups.windowed == (False, True, False)
    assert list(groups.layers.items()) == [("m.0.a", 0), ("m.1.a", 1), ("m.2.a", 2), ("m.9.a", 1), ("m.10.a", 0)]


def test_layers_outside_the_group_are_left_alone(tmp_path: Path) -> None:
    worker = make(tmp_path, OPTIONS, KVConnectorRole.WORKER, cache_config(full()))
    worker.register_kv_caches({"group0.layer": torch.zeros(8, BLOCK, 8), "shares": torch.zeros(8, BLOCK, 8)})
    assert worker.worker.engine is not None
    assert [layer.name for layer in worker.worker.engine.geometry.layers] == ["group0.layer"]
    worker.shutdown()


def test_ranks_that_disagree_on_chunks_are_refused(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, options=OPTIONS)
    shake: Any = rig.workers[0].get_handshake_metadata()
    rig.connector.scheduler._world_size = 2
    other = type(shake)(dataclasses.replace(shake.info, chunk_blocks=99))
    with pytest.raises(GeometryError, match=r"ranks chose chunks of \[16, 99\] blocks"):
        rig.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): shake, (0, 1): other})
    rig.close()


def test_the_smallest_pool_of_all_ranks_counts(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, options={**OPTIONS, "host_gib": 0.001})
    shake: Any = rig.workers[0].get_handshake_metadata()
    rig.config.parallel_config.world_size = 2
    fresh = LayerStreamConnector(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
    smaller = type(shake)(dataclasses.replace(shake.info, pool_slots=3))
    fresh.set_xfer_handshake_metadata_pp_aware({(0, 0): shake, (1, 0): smaller})
    assert fresh.scheduler._coordinator is not None
    assert fresh.scheduler._coordinator.pool_slots == 3
    rig.close()


def test_a_rank_without_a_pool_stops_the_start(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, options=OPTIONS, ranks=2)
    fresh = LayerStreamConnector(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
    shake: Any = rig.workers[0].get_handshake_metadata()
    with pytest.raises(GeometryError, match="1 of 2 ranks have set up a host pool"):
        fresh.set_xfer_handshake_metadata_pp_aware({(0, 0): shake})
    rig.close()


def test_handshakes_of_another_connector_turn_it_off_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make(tmp_path, OPTIONS, KVConnectorRole.SCHEDULER, cache_config(full()))
    caplog.clear()
    other: Any = object()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): other})
    assert "list LayerStreamConnector first" in caplog.text


def test_blocks_hashed_in_other_pieces_are_not_supported(tmp_path: Path) -> None:
    cache = cache_config(full())
    cache.hash_block_size = BLOCK // 2
    reason = unsupported(vllm_config(tmp_path, OPTIONS, 8, 64, True), cache)
    assert reason == (
        "its KV cache groups have blocks of 16 tokens, hashed every 8 and hit every None; all must be equal"
    )


@pytest.mark.parametrize(
    ("name", "value", "tells"),
    [("seed", 0, True), ("speculative_config", object(), False), ("enable_dbo", True, False)],
    ids=["plain", "drafter", "micro-batches"],
)
def test_hooks_are_counted_on_only_where_each_runs_once(tmp_path: Path, name: str, value: Any, tells: bool) -> None:
    config = vllm_config(tmp_path, OPTIONS, 8, 64, True)
    object.__setattr__(config if name == "speculative_config" else config.parallel_config, name, value)
    assert hooks_tell_layers(config) is tells


def test_the_namespace_follows_the_engine(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, options=OPTIONS)
    shake: Any = rig.workers[0].get_handshake_metadata()

    def digest(**change: Any) -> bytes:
        return namespace_of(rig.config, rig.cache, [shake.info], **{"user": "", "epoch": 0, **change}).digest()

    plain = digest()
    assert digest() == plain
    assert digest(user="tenant") != plain
    assert digest(epoch=1) != plain
    rig.config.cache_config.cache_dtype = "fp8"
    assert digest() != plain
    rig.config.cache_config.cache_dtype = "auto"
    rig.config.model_config.hf_config.rope_theta = 1234.5
    assert digest() != plain
    rig.close()
