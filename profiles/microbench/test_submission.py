"""Host time to submit one layer of a transfer, and a whole load as one graph; copies are not waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from layerstream.backends import PATHS
from layerstream.pipeline.graph_load import GraphLoad
from profiles.microbench.device_rig import LAYERS, DeviceRig, on_gpu
from profiles.microbench.results import Results, Row, Target

PAGE_BYTES = 64 << 10
ROUNDS = 60
WARM_UP = 5


@pytest.fixture
def rig() -> Iterator[DeviceRig]:
    rig = DeviceRig(PAGE_BYTES)
    yield rig
    rig.close()


def note(rig: DeviceRig) -> str:
    where = (
        "on a GPU" if rig.device.kind == "cuda" else "on the CPU device, whose copying threads share the interpreter"
    )
    return f"{rig.count} pages of {PAGE_BYTES >> 10} KiB a layer, {where}; events are made beforehand"


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("direction", ["load", "save"])
def test_submission_of_one_layer(rig: DeviceRig, results: Results, direction: str, name: str) -> None:
    path = rig.path(name)
    samples = []
    for _ in range(WARM_UP + ROUNDS):
        after = rig.device.event()
        rig.device.compute().record(after)
        events = [(rig.device.event(), rig.device.event(), rig.device.event()) for _ in range(LAYERS)]
        begun = time.perf_counter()
        for layer in range(LAYERS):
            rig.submit(path, direction, layer, after, events[layer])
        samples.append((time.perf_counter() - begun) / LAYERS)
        rig.wait(events[-1][2])
    results.add(
        Row(
            name=f"submission: {direction}, {name}, one layer",
            unit="us",
            scale=1e6,
            digits=1,
            target=on_gpu(Target(relation="<=", value=20e-6)),
            samples=samples[WARM_UP:],
            note=f"{note(rig)}; each sample the mean of {LAYERS} layers",
        )
    )


def test_submission_of_a_whole_load_as_one_graph(rig: DeviceRig, results: Results) -> None:
    name = "submission: load, graph, all layers"
    graph = GraphLoad(device=rig.device, cache=rig.cache, pool=rig.pool, kernels=rig.kernels)
    samples = []
    for _ in range(WARM_UP + ROUNDS):
        after, begun, done = (rig.device.event() for _ in range(3))
        started = time.perf_counter()
        table = rig.device.table(graph.table(rig.move))
        rig.device.compute().record(after)
        graph.submit(rig.move, table, after=after, begun=begun, done=done)
        samples.append(time.perf_counter() - started)
        rig.wait(done)
    assert rig.is_exact()
    results.add(
        Row(
            name=name,
            unit="us",
            scale=1e6,
            digits=1,
            target=on_gpu(Target(relation="<=", value=50e-6)),
            samples=samples[WARM_UP:],
            note=f"{note(rig)}, {LAYERS} layers; table, upload and launch",
        )
    )
