"""In-graph waits through the connector: what vLLM's capture adds, and what a step that replays it queues."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

from layerstream.streams.base import Device, Event, Stream
from tests.hooks.vllm.test_call_orders import OPTIONS, SecondRunnerRig
from tests.rigs.scheduler_rig import BLOCK


class NodeGates:
    """Gates whose captured nodes the rig runs: `node` is what a replay does before a layer's attention."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.captured: list[int] = []
        self.calls: list[str] = []
        self.done: dict[int, Event] = {}
        self.layers = 0

    def capture_wait(self, layer: int) -> None:
        self.captured.append(layer)

    def captured_whole(self) -> bool:
        return bool(self.captured) and self.captured == list(range(self.layers))

    def try_arm(self, compute: Stream) -> bool:
        self.calls.append("arm")
        return True

    def open(self, layer: int, done: Event) -> None:
        self.done[layer] = done

    def end_step(self, compute: Stream) -> None:
        self.calls.append("end")
        self.done.clear()

    def node(self, layer: int) -> None:
        if layer in self.done:
            self._device.compute().wait(self.done[layer])


class GraphRig(SecondRunnerRig):
    """Replays waits in FULL steps, before attention reads."""

    gates: NodeGates | None = None
    waits = True

    passed_before: list[bool]
    """Whether the compute stream had waited for a layer already when the graph came to it."""

    def _check(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        engine = self.workers[0].worker.engine
        if engine is not None and engine._gated is not None and self.mode is CUDAGraphMode.FULL:
            self.passed_before.append(engine._gated.part_of[layer].gate is not None)
        if self.gates is not None and self.mode is CUDAGraphMode.FULL and self.waits:
            self.gates.node(layer)
        super()._check(cache, layer, name, scheduled)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphRig]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rig = GraphRig(tmp_path, options={**OPTIONS, "sanitize": False})
    rig.passed_before = []
    rig.attach()
    engine = rig.workers[0].worker.engine
    assert engine is not None
    path: Any = engine._paths.load(1)
    scatter = path._kernels.scatter_pages

    def late(*args: Any, **options: Any) -> None:
        # What does not wait for a load sees the bytes before it.
        time.sleep(0.005)
        scatter(*args, **options)

    path._kernels = path._kernels._replace(scatter_pages=late)
    rig.gates = NodeGates(engine.device)
    rig.gates.layers = len(rig.layers)
    engine.in_graph = rig.gates
    rig.workers[0].worker._captures_waits = True
    yield rig
    rig.close()
    kv_transfer_state._KV_CONNECTOR_AGENT = None


def capture(rig: GraphRig, monkeypatch: pytest.MonkeyPatch, *, layers: int | None = None) -> None:
    """As vLLM captures a FULL graph: nothing is bound, every layer's attention runs once."""

    def attention(query: torch.Tensor, layer_name: str) -> None:
        pass

    hooked = maybe_transfer_kv_layer(attention)
    static: Any = rig.config.compilation_config.static_forward_context
    for name in rig.layers:
        static[name] = type("Layer", (), {"kv_cache": torch.empty(0)})()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with set_forward_context(
            {name: object() for name in rig.layers},
            rig.config,
            num_tokens=1,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(num_tokens=1),
        ):
            for name in rig.layers[:layers]:
                hooked(torch.empty(0), name)


def test_a_capture_has_a_wait_for_every_layer_and_saves_nothing(rig: GraphRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.gates is not None
    capture(rig, monkeypatch)
    assert rig.gates.captured == list(range(len(rig.layers)))
    assert rig.workers[0].build_connector_worker_meta() is None


@pytest.mark.parametrize("tokens", [4 * BLOCK + 1, 10 * BLOCK + 9])
def test_a_full_step_waits_in_its_graph(rig: GraphRig, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    assert rig.gates is not None
    capture(rig, monkeypatch)
    ids = [2 + i * 37 % 900 for i in range(tokens)]
    rig.mode = CUDAGraphMode.FULL
    rig.serve("cold", ids, max_tokens=3)
    assert rig.gates.calls == [], "a step without a load queues nothing"
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", ids, max_tokens=3) == (tokens - 1) // BLOCK * BLOCK
    assert rig.outputs["warm"] == rig.outputs["cold"]
    assert rig.gates.calls == ["arm", "end"]
    assert rig.passed_before == [False] * len(rig.layers)


@pytest.mark.parametrize("missing", ["no capture", "a layer"])
def test_without_a_wait_for_every_layer_a_full_step_waits_whole(
    rig: GraphRig, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    assert rig.gates is not None
    if missing == "a layer":
        capture(rig, monkeypatch, layers=len(rig.layers) - 1)
    rig.mode, rig.waits = CUDAGraphMode.FULL, False
    rig.serve("cold", range(2, 100))
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", range(2, 100)) == 6 * BLOCK
    assert rig.gates.calls == []
    assert rig.passed_before == [True] * len(rig.layers)


def test_a_piecewise_step_waits_in_its_hooks(rig: GraphRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.gates is not None
    capture(rig, monkeypatch)
    rig.serve("cold", range(2, 100))
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", range(2, 100)) == 6 * BLOCK
    assert rig.gates.calls == []


def test_a_load_waited_for_in_a_graph_is_not_counted_as_hidden(rig: GraphRig, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(rig, monkeypatch)
    rig.mode = CUDAGraphMode.FULL
    engine = rig.workers[0].worker.engine
    assert engine is not None
    stats = []
    count = engine._ledger._count

    def spy(transfer: Any) -> None:
        count(transfer)
        stats.append((transfer.in_graph, engine._ledger._stats.gated_load_seconds))

    monkeypatch.setattr(engine._ledger, "_count", spy)
    rig.serve("cold", range(2, 100))
    assert rig.scheduler.reset_prefix_cache()
    rig.serve("warm", range(2, 100))
    assert (True, 0.0) in stats
