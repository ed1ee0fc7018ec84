"""The page kernels of this machine's device beside a plain copy of as many bytes, and beside torch's own indexing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from layerstream.streams.base import Stream
from layerstream.trials import alternate
from profiles.microbench.device_rig import DeviceRig, facts, on_gpu, size_name
from profiles.microbench.results import Results, Row, Target

PAIRS = 20
WARM_UP = 3


@pytest.fixture(params=[16 << 10, 64 << 10, 256 << 10], ids=size_name)
def rig(request: pytest.FixtureRequest) -> Iterator[DeviceRig]:
    rig = DeviceRig(request.param)
    yield rig
    rig.close()


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_kernels_against_a_copy_and_torch(rig: DeviceRig, results: Results, kernel: str) -> None:
    packed, dense = rig.device.empty(rig.layer_bytes), rig.device.empty(rig.layer_bytes)
    packed.copy_(rig.host(0))
    dense.zero_()
    rig.finish()
    storage, pages, rows, index = rig.storages[0], rig.pages[0], rig.rows(0), rig.index()
    packed_rows = packed.view(torch.int64).view(rig.count, -1)

    def ours(stream: Stream) -> None:
        if kernel == "gather":
            stream.launch(rig.kernels.gather_pages, packed, storage, pages, rig.move.blocks)
        else:
            stream.launch(rig.kernels.scatter_pages, storage, packed, pages, rig.move.blocks)

    def torchs(stream: Stream) -> None:
        if kernel == "gather":
            stream.launch(_select, rows, index, packed_rows)
        else:
            stream.launch(_put, rows, index, packed_rows)

    def copy(stream: Stream) -> None:
        stream.copy(dense, packed)

    for queue in (ours, torchs, copy) * WARM_UP:
        rig.timed(queue)
    assert torch.equal(rows[index], packed_rows)
    size = size_name(rig.page_bytes)
    for name, queue, target in (
        (f"kernels: {kernel}, {size} / memcpy", ours, on_gpu(Target(relation=">=", value=0.90))),
        (f"kernels: torch indexing as {kernel}, {size} / memcpy", torchs, None),
    ):
        pairs = list(alternate(partial(rig.timed, copy), partial(rig.timed, queue), PAIRS))
        results.add(Row.of_pairs(name, pairs, target=target, note=facts(rig, rig.layer_bytes, pairs)))


def _select(rows: torch.Tensor, index: torch.Tensor, into: torch.Tensor) -> None:
    torch.index_select(rows, 0, index, out=into)


def _put(rows: torch.Tensor, index: torch.Tensor, packed: torch.Tensor) -> None:
    rows.index_copy_(0, index, packed)
