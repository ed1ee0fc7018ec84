"""Blocks that were just somebody else's: what was queued for them before, zeroing or an older step, never lands on what
is loaded into them, and a load that fails leaves nothing of whoever had them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from layerstream.errors import TransferError
from layerstream.jobs import JobKind, StepPlan
from tests.rigs.adversary import Adversary
from tests.rigs.engine_rig import job
from tests.rigs.virtual_rig import LAYERS, PATHS, VirtualRig

BLOCKS = [3, 4, 5, 6, 7, 8, 9]
PAGES = [(0, 7)]
OLD = -77


def queue_writes(rig: VirtualRig, value: int) -> None:
    """The compute stream is to fill the blocks, as an older step does or vLLM with zeros, and is far behind."""

    def write(layer: int) -> None:
        rig.kv[layer][BLOCKS] = value

    for layer in range(LAYERS):
        rig.virtual.work(rig.virtual.compute(), 1e-5, lambda layer=layer: write(layer))  # type: ignore[misc]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PARKED_LOAD])
@pytest.mark.parametrize("value", [0, OLD], ids=["zeroing", "an older step"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_queued_for_a_block_before_does_not_land_on_what_is_loaded(
    path: str, kind: JobKind, value: int, seed: int
) -> None:
    rig, adversary = VirtualRig(path), Adversary(random.Random(seed))
    rig.step()
    rig.virtual.run()
    queue_writes(rig, value)
    engine = rig.engine
    engine.begin_step(StepPlan(step=2, jobs=(job(1, kind, BLOCKS, *PAGES),)))
    adversary.run_some(rig.virtual)
    engine.start_loads(layerwise=True)
    for layer in range(LAYERS):
        adversary.run_some(rig.virtual)
        engine.wait_layer(layer)
    engine.end_step()
    adversary.run(rig.virtual)
    assert rig.poll().done == {1: 1}
    for layer in range(LAYERS):
        assert torch.equal(rig.kv[layer][BLOCKS], rig.pool[layer][:7])


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PARKED_LOAD])
@pytest.mark.parametrize("fails", range(LAYERS))
def test_a_load_that_fails_leaves_zeros_or_its_own_bytes(
    path: str, kind: JobKind, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = VirtualRig(path)
    rig.step()
    rig.virtual.run()
    for cache in rig.kv:
        cache[BLOCKS] = OLD
    queue_writes(rig, 0)
    engine = rig.engine
    way: Any = engine._paths.load(7)
    load = way.load

    def broken(layers: tuple[int, ...], *arguments: Any, **more: Any) -> None:
        if fails in layers:
            raise TransferError("the driver refused")
        load(layers, *arguments, **more)

    monkeypatch.setattr(way, "load", broken)
    engine.begin_step(StepPlan(step=2, jobs=(job(1, kind, BLOCKS, *PAGES),)))
    if kind is JobKind.LOAD:
        # The engine stops: nothing is served from these blocks.
        with pytest.raises(TransferError):
            engine.start_loads(layerwise=True)
        with pytest.raises(TransferError):
            engine.wait_layer(fails)
    else:
        engine.end_step()
    rig.virtual.run()
    if kind is JobKind.PARKED_LOAD:
        assert rig.poll().failed == {1: 1}
    for layer in range(LAYERS):
        want = torch.zeros_like(rig.pool[layer][:7]) if layer >= fails else rig.pool[layer][:7]
        assert torch.equal(rig.kv[layer][BLOCKS], want)
