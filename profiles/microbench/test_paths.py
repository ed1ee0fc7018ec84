"""Every transfer path, and the ways others move pages, beside plain copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from layerstream.backends import PATHS
from layerstream.streams.base import Stream
from layerstream.trials import alternate
from profiles.microbench.device_rig import LAYERS, DeviceRig, facts, on_gpu, size_name
from profiles.microbench.lmcache_ops import NotThereError, lmcache_transfer
from profiles.microbench.results import Results, Row, Target

PAIRS = 20
WARM_UP = 2


@pytest.fixture(params=[16 << 10, 64 << 10, 256 << 10], ids=size_name)
def rig(request: pytest.FixtureRequest) -> Iterator[DeviceRig]:
    rig = DeviceRig(request.param)
    yield rig
    rig.close()


@pytest.fixture(params=["load", "save"])
def direction(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def add_row(
    rig: DeviceRig,
    results: Results,
    direction: str,
    name: str,
    seconds: Callable[[], float],
    *,
    target: Target | None = None,
    exact: bool = True,
) -> None:
    """Measure `seconds` in turns with plain copies, and add the row.

    With `exact` the KV cache and the pool must hold the same bytes before anything is measured.
    """
    rig.differ()
    for _ in range(WARM_UP):
        seconds()
    if exact:
        assert rig.is_exact()
    pairs = list(
        alternate(
            lambda: rig.timed(lambda stream: rig.plain_copies(stream, direction)),
            seconds,
            PAIRS,
        )
    )
    name = f"paths: {direction}, {name}, {size_name(rig.page_bytes)} / memcpy"
    results.add(Row.of_pairs(name, pairs, target=target, note=facts(rig, LAYERS * rig.layer_bytes, pairs)))


@pytest.mark.parametrize("name", PATHS)
def test_transfer_paths(rig: DeviceRig, results: Results, direction: str, name: str) -> None:
    path = rig.path(name)
    target = on_gpu(Target(relation=">=", value=0.95)) if name == "staged" else None
    add_row(rig, results, direction, name, lambda: rig.transfer(path, direction), target=target)


def test_one_copy_a_page(rig: DeviceRig, results: Results, direction: str) -> None:
    def queue(stream: Stream) -> None:
        rig.page_copies(stream, direction)

    add_row(rig, results, direction, "one copy a page", lambda: rig.timed(queue))


def test_one_batch_of_copies_a_layer(rig: DeviceRig, results: Results, direction: str) -> None:
    batches = [rig.batch_of(layer, direction) for layer in range(LAYERS)]

    def queue(stream: Stream) -> None:
        for batch in batches:
            stream.copy_batch(batch)

    add_row(rig, results, direction, "one batch of copies a layer", lambda: rig.timed(queue))


def test_torch_indexing_and_a_copy(rig: DeviceRig, results: Results, direction: str) -> None:
    index = rig.index()
    shape = (rig.count, rig.page_bytes // 8)
    staging = rig.device.empty(rig.layer_bytes).view(torch.int64).view(shape)

    def queue(stream: Stream) -> None:
        for layer in range(LAYERS):
            host = rig.host(layer).view(torch.int64).view(shape)
            stream.launch(_load if direction == "load" else _save, rig.rows(layer), index, staging, host)

    add_row(rig, results, direction, "torch indexing and a copy", lambda: rig.timed(queue))


def test_lmcache_operations(rig: DeviceRig, results: Results, direction: str) -> None:
    try:
        transfer = lmcache_transfer(rig, direction)
    except NotThereError as error:
        name = f"paths: {direction}, LMCache's operation, {size_name(rig.page_bytes)} / memcpy"
        results.add(Row(name=name, failure=f"not run: {error}"))
        pytest.skip(str(error))
    add_row(
        rig,
        results,
        direction,
        "LMCache's operation",
        lambda: rig.timed(lambda stream: stream.launch(transfer)),
        # A save goes to a host tensor of LMCache's form, not to the pool.
        exact=direction == "load",
    )


def _load(rows: torch.Tensor, index: torch.Tensor, staging: torch.Tensor, host: torch.Tensor) -> None:
    staging.copy_(host, non_blocking=True)
    rows.index_copy_(0, index, staging)


def _save(rows: torch.Tensor, index: torch.Tensor, staging: torch.Tensor, host: torch.Tensor) -> None:
    torch.index_select(rows, 0, index, out=staging)
    host.copy_(staging, non_blocking=True)
