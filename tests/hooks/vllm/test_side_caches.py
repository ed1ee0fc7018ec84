"""Layers that keep a second cache which no hook knows, as an index or scales beside keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

SIDE = 1
"""The layer of the rig that is another one's second cache: its hooks never run."""
STREAMS = {"staged": "_load_scatter", "zero_copy": "_load", "batch_dma": "_load"}
"""Path -> what writes the KV cache."""


def without_hooks(rig: SchedulerRig, side: str) -> None:
    """No hook of this layer runs; the rig still writes it, and checks it when attention reads."""
    for worker in rig.workers:
        for hook in ("wait_for_layer_load", "save_kv_layer"):
            call: Callable[..., None] = getattr(worker, hook)

            def skip(name: str, *more: Any, call: Callable[..., None] = call) -> None:
                if name != side:
                    call(name, *more)

            setattr(worker, hook, skip)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_a_second_cache_is_there_when_the_first_is(make_rig: MakeRig, path: str, mode: str) -> None:
    rig = make_rig(options={"load_mode": mode, "transfer_path": path, "layers_per_gate": 1, "sanitize": False})
    without_hooks(rig, rig.layers[SIDE])
    engine = rig.workers[0].worker.engine
    assert engine is not None
    loads: Any = engine._paths.load(1)
    load = loads.load

    def slow(layers: tuple[int, ...], *arguments: Any, **more: Any) -> None:
        if SIDE in layers:
            # What is queued behind it comes late, and attention is soon there.
            getattr(loads, STREAMS[path]).launch(time.sleep, 0.05)
        load(layers, *arguments, **more)

    loads.load = slow
    for turn in range(2):
        ids = prompt(7 * BLOCK + 3, seed=turn)
        rig.serve(f"cold {turn}", ids, max_tokens=20)
        assert rig.scheduler.reset_prefix_cache()
        # Every byte of every layer is checked at its turn.
        assert rig.serve(f"warm {turn}", [*ids, *rig.outputs[f"cold {turn}"]]) == (len(ids) + 19) // BLOCK * BLOCK
        assert rig.scheduler.reset_prefix_cache()
    assert_idle(rig)
