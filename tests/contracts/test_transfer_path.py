"""Every transfer path, on CUDA streams that run in any order their events allow: bytes are right in all of them.

The model's own work is queued on the compute stream too: it writes the blocks a step saves, overwrites them in the
next step, and reads the blocks a step loads. A missing edge lets some order run a read before its write, or a write
before an earlier read, and shows as wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from layerstream.jobs import JobKind, StepPlan
from tests.rigs.fake_cuda import FakeCuda, FakeStream
from tests.rigs.path_rig import LAYERS, job, make_rig

PATHS = pytest.mark.parametrize("path", ["zero_copy", "batch_dma", "staged"])
GROUPS = pytest.mark.parametrize("group", [1, 3], ids=["each layer", "three layers together"])


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


@PATHS
@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "whole"])
@GROUPS
@pytest.mark.parametrize("seed", range(20))
def test_every_order_the_events_allow_moves_the_right_bytes(
    api: FakeCuda, path: str, group: int, hooks: bool, seed: int
) -> None:
    dice = random.Random(seed)

    def choose(ready: list[FakeStream]) -> FakeStream:
        return dice.choice(ready)

    rig = make_rig(api, path=path, group=group)
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


@PATHS
def test_loads_and_saves_of_one_step_do_not_mix(api: FakeCuda, path: str) -> None:
    rig = make_rig(api, path=path)
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


@PATHS
def test_the_host_never_waits(api: FakeCuda, path: str) -> None:
    """The fake fails on `synchronize`, and nothing queued runs before the test says so."""
    rig = make_rig(api, path=path)
    engine = rig.engine
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, list(range(16)), list(range(16))),)))
    engine.end_step()
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, list(range(16)), list(range(16))),)))
    engine.start_loads(layerwise=False)
    engine.end_step()
    assert engine.poll() is None
    api.run()
    assert rig.reports().done == {1: 1, 2: 1}


@PATHS
@pytest.mark.parametrize("seed", range(8))
def test_a_layer_that_does_not_run_in_a_step_is_gated_for_later_ones(api: FakeCuda, path: str, seed: int) -> None:
    rig = make_rig(api, path=path)
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


@PATHS
@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "whole"])
def test_a_load_that_is_done_before_its_gates_are_reached_is_reported_later(
    api: FakeCuda, path: str, hooks: bool
) -> None:
    """As on a GPU whose compute is behind: times of gates that were not passed yet cannot be asked for."""
    rig = make_rig(api, path=path)
    engine = rig.engine
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [4, 5], [0, 1]),)))
    engine.start_loads(layerwise=hooks)
    release = api.hold()
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
    api.run()
    assert engine.poll() is None
    release()
    api.run()
    assert rig.reports().done == {1: 1}


@PATHS
def test_the_first_layer_is_computed_before_the_last_has_arrived(api: FakeCuda, path: str) -> None:
    rig = make_rig(api, path=path)
    engine = rig.engine
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [4], [0]),)))
    engine.start_loads(layerwise=True)
    engine.wait_layer(0)
    seen: dict[int, torch.Tensor] = {}
    rig.read(0, [4], seen)
    # The compute stream goes as soon as it can, and the load only as far as that takes.
    compute = api.current_stream()
    while 0 not in seen:
        ready = [stream for stream in api.streams if stream.runnable()]
        stream = compute if compute in ready else ready[0]
        stream.pending.popleft().run()
    assert any(stream.pending for stream in api.streams), "the whole load was waited for"
    for layer in range(1, LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
    api.run()
    assert rig.reports().done == {1: 1}
