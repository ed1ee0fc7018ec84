"""How fast the page kernels are beside a copy of the same bytes within the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from layerstream.geometry import LayerPages
from layerstream.kernels.gather import gather_pages
from layerstream.kernels.scatter import scatter_pages
from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.layouts import RATED, serving_layouts
from profiles.gpu_validate.rows import Row

LAYER_BYTES = 64 << 20
"""Of each layer that is measured: half of a 32k-token prefix of Llama-8B."""
L2_PROOF_BYTES = 1 << 30
"""Bytes touched before the same ones are again: many times any L2 cache."""


def kernels_keep_up(bench: Bench) -> Iterator[Row]:
    """Gather and scatter three quarters of a layer's pages in random order."""
    for index, form in enumerate(serving_layouts(256)):
        if index >= RATED and form.page_stride != form.page_bytes:
            continue
        pages = serving_layouts(max(256, min(65536, LAYER_BYTES // form.page_bytes)))[index]
        yield from layer_rates(bench, pages, judged=index < RATED)
        torch.cuda.empty_cache()


def layer_rates(bench: Bench, pages: LayerPages, *, judged: bool) -> Iterator[Row]:
    """Rows of one layout."""
    count = pages.num_pages * 3 // 4
    nbytes = count * pages.page_bytes
    copies = max(2, L2_PROOF_BYTES // pages.end)
    storages = [torch.zeros(pages.end, dtype=torch.uint8, device=bench.place) for _ in range(copies)]
    packed = [torch.zeros(nbytes, dtype=torch.uint8, device=bench.place) for _ in range(copies)]
    other = [torch.zeros(nbytes, dtype=torch.uint8, device=bench.place) for _ in range(copies)]
    table = torch.randperm(pages.num_pages, generator=torch.Generator().manual_seed(1))[:count].int().to(bench.place)

    def each(way: Callable[[int], object]) -> Callable[[], None]:
        def queue() -> None:
            for call in range(copies):
                way(call)

        return queue

    ways = {
        "copy": each(lambda call: other[call].copy_(packed[call])),
        "gather": each(lambda call: gather_pages(packed[call], storages[call], pages, table)),
        "scatter": each(lambda call: scatter_pages(storages[call], packed[call], pages, table)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(bench.rounds + 2):
        for name in sorted(ways, reverse=number % 2 == 1):
            seconds[name].append(bench.device_seconds(ways[name]) / copies)
    for name in ("gather", "scatter"):
        # The first rounds compile and warm up.
        yield Row.of_pairs(
            f"rate of {name} / of a copy: {pages.name}",
            list(zip(seconds["copy"][2:], seconds[name][2:], strict=True)),
            target=bench.for_gpu(">=", 0.90) if judged else None,
            note=f"{nbytes / 1e6:.0f} MB in {count} pages, copied at {nbytes / min(seconds['copy']) / 1e9:.0f} GB/s",
        )


def launch_costs_the_host(bench: Bench) -> Iterator[Row]:
    """Host time of one launch, the device being idle."""
    pages = serving_layouts(64)[2]
    storage = torch.zeros(pages.end, dtype=torch.uint8, device=bench.place)
    packed = torch.zeros(pages.page_bytes, dtype=torch.uint8, device=bench.place)
    table = torch.zeros(1, dtype=torch.int32, device=bench.place)
    times = []
    for _ in range(bench.sized(220, 40)):
        begun = time.perf_counter()
        gather_pages(packed, storage, pages, table)
        times.append(time.perf_counter() - begun)
    bench.finish()
    yield Row(name="host time of one launch", samples=times[20:], unit="us", scale=1e6, digits=1)
