"""The connector's worker half: what hooks do in and outside captures, how a step waits, what a rank tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.graphs.mode import GateMode
from layerstream.hooks.vllm import worker as worker_module
from layerstream.hooks.vllm.compat import forward_gate_mode
from tests.rigs.scheduler_rig import BLOCK, LAYERS, SchedulerRig

OPTIONS = {"host_gib": 0.002, "chunk_tokens": 4 * BLOCK, "staging_mib": 1}
FULL, PIECEWISE = SimpleNamespace(name="FULL"), SimpleNamespace(name="PIECEWISE")


def context(metadata: object, mode: object) -> Any:
    """A forward context of vLLM's, as far as the connector looks."""
    return SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)


class Gates:
    """Stands for gates in graphs."""

    whole = True

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture_wait(self, layer: int) -> None:
        self.captured.append(layer)

    def captured_whole(self) -> bool:
        return self.whole


class WorkerRig:
    """A worker half whose engine tells what it is called with, in a process that captures a graph or does not."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.rig = SchedulerRig(folder, options=OPTIONS)
        self.layers = self.rig.layers
        self.connector = self.rig.workers[0]
        self.worker = self.connector.worker
        self.gates = Gates()
        self.calls: list[Any] = []
        self.capturing = True
        engine: Any = self.worker.engine
        engine.in_graph, self.worker._captures_waits = self.gates, True
        patch.setattr(engine, "wait_layer", lambda layer: self.calls.append(("wait", layer)))
        patch.setattr(engine, "save_layer", lambda layer: self.calls.append(("save", layer)))
        patch.setattr(engine, "start_loads", lambda **how: self.calls.append(how))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def hooks(self, *layers: str) -> None:
        for layer in layers:
            self.connector.wait_for_layer_load(layer)
            self.connector.save_kv_layer(layer, torch.empty(0), None)

    def start(self, metadata: object, mode: object, **call: object) -> dict[str, bool]:
        """How loads are started."""
        self.calls.clear()
        self.worker.start_loads(context(metadata, mode), call)
        asked: dict[str, bool]
        (asked,) = self.calls
        return asked


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerRig]:
    rig = WorkerRig(tmp_path, monkeypatch)
    yield rig
    assert rig.worker.engine is not None
    rig.worker.engine.in_graph = None
    rig.rig.close()


def test_hooks_in_a_capture_add_waits_and_do_nothing_else(rig: WorkerRig) -> None:
    assert rig.connector.has_connector_metadata(), "or vLLM calls no hook while it captures"
    rig.hooks(*rig.layers)
    assert (rig.gates.captured, rig.calls) == (list(range(LAYERS)), [])


def test_hooks_outside_a_capture_add_none(rig: WorkerRig) -> None:
    rig.capturing = False
    assert not rig.connector.has_connector_metadata()
    rig.hooks(rig.layers[1])
    assert (rig.gates.captured, rig.calls) == ([], [("wait", 1), ("save", 1)])


def test_where_hooks_do_not_tell_layers_nothing_is_captured_saved_or_gated_by_them(rig: WorkerRig) -> None:
    rig.worker._hooks_tell_layers = rig.worker._captures_waits = False
    assert not rig.connector.has_connector_metadata()
    rig.capturing = False
    rig.connector.save_kv_layer(rig.layers[0], torch.empty(0), None)
    assert (rig.gates.captured, rig.calls) == ([], [])
    assert rig.start({}, PIECEWISE) == {"layerwise": False, "in_graph": False}
    assert rig.start({}, FULL) == {"layerwise": False, "in_graph": False}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "with a gap"])
def test_full_steps_wait_in_the_graph_if_its_captures_were_whole(rig: WorkerRig, whole: bool) -> None:
    rig.gates.whole = whole
    assert rig.start({}, FULL) == {"layerwise": False, "in_graph": whole}
    assert rig.start(None, PIECEWISE, attn_metadata={}) == {"layerwise": False, "in_graph": whole}
    assert rig.start({}, PIECEWISE) == {"layerwise": True, "in_graph": False}
    assert rig.start(None, PIECEWISE) == {"layerwise": False, "in_graph": False}


def test_a_rank_tells_its_number_and_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def spy(*args: Any, **options: Any) -> Any:
        asked.update(options)
        return build_engine(*args, **options)

    monkeypatch.setattr(worker_module, "build_engine", spy)
    rig = SchedulerRig(tmp_path, options=OPTIONS)
    worker = rig.workers[0].worker
    parallel = worker._vllm_config.parallel_config
    parallel.rank, parallel.world_size, parallel.data_parallel_size_local = 5, 2, 3
    worker.close()
    worker.register_kv_caches(rig.kv[0])
    assert (asked["rank"], asked["local_ranks"]) == (5, 6)
    assert worker.engine is not None
    monkeypatch.setattr(type(worker.engine.pool), "ready_slots", property(lambda _: 1))
    info = worker.info()
    assert info is not None
    assert (info.rank, info.ready_slots) == (5, 1)
    worker.close()
    assert worker.info() is None
    rig.close()


@pytest.mark.parametrize(
    ("metadata", "mode", "call", "ready", "want"),
    [
        ({}, FULL, {}, False, GateMode.WHOLE),
        ({}, FULL, {}, True, GateMode.IN_GRAPH),
        ({}, PIECEWISE, {}, True, GateMode.LAYERWISE),
        (None, PIECEWISE, {"attn_metadata": {}}, True, GateMode.IN_GRAPH),
        (None, PIECEWISE, {}, True, GateMode.WHOLE),
        (None, None, {"attn_metadata": None}, True, GateMode.WHOLE),
    ],
)
def test_metadata_and_graph_mode_decide_how_a_step_waits(
    metadata: object, mode: object, call: dict[str, object], ready: bool, want: GateMode
) -> None:
    assert forward_gate_mode(context(metadata, mode), call, in_graph_ready=ready) is want
