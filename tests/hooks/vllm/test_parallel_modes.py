"""Parallel modes in which a block is not what it seems: the connector stays out, says so, and gives no hit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from layerstream.hooks.vllm.connector import LayerStreamConnector
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_name_and_served_without_hits(
    make_rig: MakeRig, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.serve("a", prompt(100))
    setattr(rig.config.parallel_config, field, 2)
    logger = logging.getLogger("vllm.layerstream")
    logger.addHandler(caplog.handler)
    scheduler = LayerStreamConnector(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
    logger.removeHandler(caplog.handler)
    assert f"{field} is 2; only 1 is supported" in caplog.text
    request: Any = rig.requests["a"]
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    worker = LayerStreamConnector(rig.config, KVConnectorRole.WORKER, rig.cache)
    worker.register_kv_caches(rig.kv[0])
    assert worker.get_handshake_metadata() is None
    for connector in (scheduler, worker):
        connector.shutdown()


def test_blocks_are_as_large_as_the_engine_says(make_rig: MakeRig) -> None:
    """Not as an option or a shape has it: the rig's caches have the same sizes for blocks of any number of tokens."""
    rig = make_rig()
    assert rig.connector.scheduler._block_tokens == rig.cache.kv_cache_groups[0].kv_cache_spec.block_size == BLOCK
    rig.cache.kv_cache_groups[0].kv_cache_spec = rig.cache.kv_cache_groups[0].kv_cache_spec.copy_with_new_block_size(64)
    scheduler = LayerStreamConnector(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
    assert scheduler.scheduler._block_tokens == 64
    scheduler.shutdown()
