"""Every byte that the page kernels move, and every byte beside it, against the slow copy of each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerstream.backends import open_device
from layerstream.geometry import LayerPages
from layerstream.kernels.stack import PageStack
from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.layouts import far_layout, odd_layouts, serving_layouts, spaced
from profiles.gpu_validate.rows import Row, not_run, right
from profiles.gpu_validate.world import POISON, noise

BESIDE = 64
"""Bytes behind a buffer that must not change."""


class Copier:
    """Kernels of a device, and random memory there."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.place = bench, bench.place
        device, _, self.kernels = open_device(bench.place)
        device.close(1.0)
        self._generator = torch.Generator(self.place).manual_seed(1)

    def noise(self, nbytes: int) -> torch.Tensor:
        """Random bytes on the device."""
        return noise(nbytes, self.place, self._generator)

    def ids(self, pages: int, count: int) -> list[int]:
        """Pages to copy in random order: some skipped, and on a GPU one past the last page."""
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(count))[:count].tolist()
        for place in (0, count // 5, count // 5 + 1, count - 1):
            order[place] = -1
        if self.bench.cuda:
            order[count // 2] = pages + 5
        return [int(page) for page in order]

    def table(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A table on the device."""
        return torch.tensor(values, dtype=dtype, device=self.place)

    def poisoned(self, nbytes: int, *, host: bool = False) -> torch.Tensor:
        """Memory in which every byte is known; on the host it is pinned."""
        if host and self.bench.cuda:
            return torch.full((nbytes,), POISON, dtype=torch.uint8, pin_memory=True)
        return torch.full((nbytes,), POISON, dtype=torch.uint8, device=self.place)


def copy_slowly(
    dst: torch.Tensor, src: torch.Tensor, pages: LayerPages, ids: Sequence[int], places: Sequence[int], *, scatter: bool
) -> None:
    """The oracle: one torch copy for each run of each page, `places[i]` being where page i's packed form begins."""
    for block, place in zip(ids, places, strict=True):
        if not 0 <= block < pages.num_pages:
            continue
        for run, run_offset in enumerate(pages.run_offsets):
            paged = pages.offset + block * pages.page_stride + run_offset
            packed = place + run * pages.run_bytes
            to, start = (paged, packed) if scatter else (packed, paged)
            dst[to : to + pages.run_bytes] = src[start : start + pages.run_bytes]


def side_by_side(pages: LayerPages, count: int) -> list[int]:
    """Where packed pages lie without places."""
    return [index * pages.page_bytes for index in range(count)]


def pages_differ(copier: Copier, pages: LayerPages, *, count: int | None, places: bool, host: bool) -> list[str]:
    """Which copies of one layer's pages left a byte other than the oracle does."""
    listed = min(100, pages.num_pages)
    ids = copier.ids(pages.num_pages, listed)
    where = side_by_side(pages, listed)
    options: dict[str, object] = {}
    if places:
        step = pages.page_bytes + 3 * pages.alignment
        where = [(listed - 1 - index) * step for index in range(listed)]
        options["places"] = copier.table(where, torch.int64)
    if count is not None:
        options["count"] = copier.table([count])
    if host:
        options["packed_on_host"] = True
    used = listed if count is None else min(count, listed)
    storage, table = copier.noise(pages.end + 16), copier.table(ids)
    packed = copier.poisoned(max(where) + pages.page_bytes + BESIDE, host=host)
    expected = packed.clone()
    copy_slowly(expected, storage, pages, ids[:used], where[:used], scatter=False)
    copier.kernels.gather_pages(packed, storage, pages, table, **options)
    copier.bench.finish()
    case = f"{pages.name}, count {count}{', places' * places}{', host' * host}"
    wrong = [] if torch.equal(packed, expected) else [f"gather: {case}"]
    packed.copy_(copier.noise(packed.numel()))
    wanted, restored = torch.full_like(storage, POISON), torch.full_like(storage, POISON)
    copy_slowly(wanted, packed, pages, ids[:used], where[:used], scatter=True)
    copier.kernels.scatter_pages(restored, packed, pages, table, **options)
    copier.bench.finish()
    return wrong if torch.equal(restored, wanted) else [*wrong, f"scatter: {case}"]


def pages_are_exact(bench: Bench, copier: Copier | None = None) -> Iterator[Row]:
    """Pages of one layer, on every layout."""
    copier = copier or Copier(bench)
    number = bench.sized(256, 12)
    wrong: list[str] = []
    left_out: list[LayerPages] = []
    fits: list[LayerPages] = []
    for pages in (*serving_layouts(number), *odd_layouts(number)):
        free = bench.free_bytes() if bench.cuda else 1 << 30
        (fits if 4 * pages.end < free else left_out).append(pages)
    for index, pages in enumerate(fits):
        # Without a count it is another kernel, and compiling it takes most of this check's time.
        for count in (None, 0, 1, 63, 1000)[index % 2 :] if bench.cuda else (None, 7):
            wrong += pages_differ(copier, pages, count=count, places=False, host=False)
    note = f"left out for want of memory: {', '.join(pages.name for pages in left_out)}" if left_out else ""
    yield right(f"gather, scatter of pages: {len(fits)} layouts", wrong, note)
    wrong = []
    for pages in fits[::3]:
        wrong += pages_differ(copier, pages, count=41, places=True, host=False)
    yield right("gather, scatter with places: to and from anywhere", wrong)
    wrong = []
    for pages in (fits[0], fits[3], fits[6]):
        wrong += pages_differ(copier, pages, count=None, places=False, host=True)
        wrong += pages_differ(copier, pages, count=41, places=True, host=True)
    yield right("gather, scatter between pinned memory and GPU", wrong)


def stacks_are_exact(bench: Bench, copier: Copier | None = None) -> Iterator[Row]:
    """Several layers by one launch: in storages of their own, and in one."""
    copier = copier or Copier(bench)
    number, wrong = bench.sized(128, 16), []
    for form in (serving_layouts(number)[1], serving_layouts(number)[6], odd_layouts(number)[1]):
        for shared in (False, True):
            for host in (False, True):
                wrong += stack_differs(copier, form, shared=shared, host=host)
    yield right("gather, scatter of several layers by one launch", wrong)


def stack_differs(copier: Copier, form: LayerPages, *, shared: bool, host: bool) -> list[str]:
    """Which copies of layers 1 and 2 of four left another byte than the oracle does."""
    spread = -(-form.end // 16) * 16
    layers = [
        LayerPages(
            name=f"layer.{i}",
            num_pages=form.num_pages,
            offset=form.offset + (i * spread if shared else 0),
            page_stride=form.page_stride,
            run_offsets=form.run_offsets,
            run_bytes=form.run_bytes,
        )
        for i in range(4)
    ]
    own = [copier.noise(4 * spread + 16)] * 4 if shared else [copier.noise(spread + 16) for _ in range(4)]
    count = min(48, form.num_pages)
    ids = copier.ids(form.num_pages, count)
    used, table = count - 3, copier.table(ids)
    wrong = []
    for places in (False, True):
        where = side_by_side(form, count)
        starts = [0, 0, count * form.page_bytes, 0]
        options: dict[str, object] = {"count": copier.table([used])}
        if places:
            where = [place + 2 * form.alignment * index for index, place in enumerate(reversed(where))]
            starts[2] = max(where) + form.page_bytes + form.alignment
            options["places"] = copier.table(where, torch.int64)
            options["layer_places"] = copier.table(starts, torch.int64)
        if host:
            options["packed_on_host"] = True
        nbytes = starts[2] + max(where) + form.page_bytes + BESIDE
        case = f"{form.name}{', one storage' * shared}{', places' * places}{', host' * host}"
        stack = PageStack(own, layers)
        packed = copier.poisoned(nbytes, host=host)
        expected = packed.clone()
        for i in (1, 2):
            at = [starts[i] + place for place in where[:used]]
            copy_slowly(expected, own[i], layers[i], ids[:used], at, scatter=False)
        copier.kernels.gather_layers(packed, stack, 1, 2, table, **options)
        copier.bench.finish()
        if not torch.equal(packed, expected):
            wrong.append(f"gather: {case}")
        packed.copy_(copier.noise(nbytes))
        wanted = {storage.data_ptr(): storage.clone() for storage in own}
        for i in (1, 2):
            at = [starts[i] + place for place in where[:used]]
            copy_slowly(wanted[own[i].data_ptr()], packed, layers[i], ids[:used], at, scatter=True)
        copier.kernels.scatter_layers(stack, 1, 2, packed, table, **options)
        copier.bench.finish()
        if not all(torch.equal(storage, wanted[storage.data_ptr()]) for storage in own):
            wrong.append(f"scatter: {case}")
    return wrong


def captured_launch_serves_any_count(bench: Bench) -> Iterator[Row]:
    """Replay one captured gather with other counts and other ids in its tables."""
    copier = Copier(bench)
    pages = serving_layouts(256)[0]
    storage, table = copier.noise(pages.end), copier.table([-1] * 64)
    counter, packed = copier.table([0]), copier.poisoned(64 * pages.page_bytes)

    def launch() -> None:
        copier.kernels.gather_pages(packed, storage, pages, table, count=counter)

    launch()
    bench.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    wrong = []
    for count in (0, 1, 40, 64):
        ids = torch.randperm(256, generator=torch.Generator().manual_seed(count))[:64].int()
        table.copy_(ids)
        counter.fill_(count)
        packed.fill_(POISON)
        expected, used = packed.clone(), [int(page) for page in ids[:count]]
        copy_slowly(expected, storage, pages, used, side_by_side(pages, count), scatter=False)
        graph.replay()
        bench.finish()
        if not torch.equal(packed, expected):
            wrong.append(f"count {count}")
    yield right("one captured launch serves any count and ids", wrong)


def far_pages_are_exact(bench: Bench) -> Iterator[Row]:
    """Offsets past 2**31 elements, on the paged and on the packed side."""
    copier = Copier(bench)
    for word in (1, 4, 16):
        pages = far_layout(word)
        name = f"past 2**31 elements of {min(word, 8)} B ({pages.end / 2**30:.0f} GiB)"
        if (free := bench.free_bytes()) < pages.end + (1 << 30):
            yield not_run(name, f"{free / 2**30:.0f} GiB of GPU memory are free")
            continue
        yield right(name, far_differs(copier, pages))
        torch.cuda.empty_cache()


def far_differs(copier: Copier, pages: LayerPages) -> list[str]:
    """Which copies of the last and the first page went elsewhere."""
    storage = torch.zeros(pages.end, dtype=torch.uint8, device=copier.place)
    content, table, half = copier.noise(2 * pages.page_bytes), copier.table([2, 0]), pages.page_bytes
    spots = [
        (pages.offset + block * pages.page_stride + run, index * half + number * pages.run_bytes)
        for index, block in enumerate((2, 0))
        for number, run in enumerate(pages.run_offsets)
    ]
    copier.kernels.scatter_pages(storage, content, pages, table)
    copier.bench.finish()
    wrong = []
    if not all(
        torch.equal(storage[at : at + pages.run_bytes], content[start : start + pages.run_bytes]) for at, start in spots
    ):
        wrong.append("scatter")
    packed = torch.zeros_like(content)
    copier.kernels.gather_pages(packed, storage, pages, table)
    copier.bench.finish()
    if not torch.equal(packed, content):
        wrong.append("gather")
    far = spots[0][0]
    for at, _ in spots:
        storage[at : at + pages.run_bytes] = 0
    if any(bool(part.any()) for part in torch.split(storage, 1 << 30)):
        wrong.append("scatter wrote beside its pages")
    # Begins at one word, so that accesses and elements are as narrow as those of `pages`.
    near = spaced("near", 1, half, offset=pages.offset)
    source, place = copier.noise(near.end), copier.table([far], torch.int64)
    copier.kernels.gather_pages(storage, source, near, copier.table([0]), places=place)
    copier.bench.finish()
    if not torch.equal(storage[far : far + half], source[near.offset :]):
        wrong.append("gather to a far place")
    return wrong
