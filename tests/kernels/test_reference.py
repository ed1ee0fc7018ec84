from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.reference import gather_pages, scatter_pages
from tests.kernels.pages import dense, ids, noise

MANY = 256
LARGE = dense(128 * 1024, num_pages=MANY)
GAPPED = dense(128 * 1024, num_pages=MANY, gap=64)


def copy_of(copy: Callable[..., None], layer: LayerPages, parts: int = 1) -> Callable[[], None]:
    paged, packed = noise(layer.end), noise(MANY * layer.page_bytes)
    blocks = torch.arange(MANY - 1, -1, -1, dtype=torch.int32)
    dst, src = (packed, paged) if copy is gather_pages else (paged, packed)
    # Parts in falling order, none of which joins the next.
    places = (torch.arange(MANY) * layer.page_bytes).view(parts, -1).flip(0).flatten()
    return lambda: copy(dst, src, layer, blocks, places=None if parts == 1 else places)


@pytest.mark.parametrize(
    ("layer", "parts"),
    [(LARGE, 1), (LARGE, 4), (GAPPED, 1), (GAPPED, 4)],
    ids=["dense", "dense parts", "gapped", "gapped parts"],
)
@pytest.mark.parametrize("copy", [gather_pages, scatter_pages])
def test_a_copy_lets_other_threads_run(copy: Callable[..., None], layer: LayerPages, parts: int) -> None:
    run, copying = copy_of(copy, layer, parts), [0]
    turns = Counter[int]()

    def work() -> None:
        for number in range(1, 21):
            copying[0] = number
            run()
            copying[0] = 0

    interval = sys.getswitchinterval()
    # Nobody is made to give the GIL up within the test. Where torch or numpy give it up for something small this thread
    # gets a turn and its sleep hands it back; only while the bytes themselves are copied does it get several in a row.
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            turns[copying[0]] += 1
            time.sleep(1e-4)
    finally:
        sys.setswitchinterval(interval)
    assert sum(turns[number] >= 5 for number in range(1, 21)) >= 5, turns


@pytest.mark.parametrize("layer", [LARGE, GAPPED], ids=["dense", "gapped"])
@pytest.mark.parametrize("copy", [gather_pages, scatter_pages])
def test_a_copy_starts_no_threads(copy: Callable[..., None], layer: LayerPages) -> None:
    run, tasks = copy_of(copy, layer), Path("/proc/self/task")
    counts: list[int] = []

    def work() -> None:
        counts.append(len(list(tasks.iterdir())))
        run()
        counts.append(len(list(tasks.iterdir())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert counts[0] == counts[1]


def test_memory_of_another_device_is_refused() -> None:
    layer = dense(16)
    with pytest.raises(GeometryError, match="copies CPU memory, not meta"):
        gather_pages(
            torch.empty(16, dtype=torch.uint8, device="meta"),
            torch.empty(layer.end, dtype=torch.uint8, device="meta"),
            layer,
            ids([0]).to("meta"),
        )
