from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstream.errors import TransferError
from layerstream.geometry import LayerPages
from layerstream.kernels.reference import gather_layers, gather_pages, scatter_layers, scatter_pages
from layerstream.kernels.stack import PageStack
from layerstream.streams.accesses import Ranges, batch_accesses, declared, overlaps, page_accesses, ranges, spans
from layerstream.streams.base import CopyBatch
from layerstream.streams.tables import TableCopies

ACCESSES = page_accesses(gather_pages, scatter_pages, gather_layers, scatter_layers)

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def bytes_of(spread: Ranges) -> set[int]:
    return {address for start, end in spread.tolist() for address in range(start, end)}


@given(pairs)
def test_ranges_cover_the_same_bytes_and_do_not_touch(given_pairs: list[tuple[int, int]]) -> None:
    spread = ranges(given_pairs)
    assert bytes_of(spread) == {address for start, end in given_pairs for address in range(start, end)}
    flat = spread.ravel().tolist()
    assert flat == sorted(set(flat))
    assert spread.dtype == np.int64 and spread.shape[1:] == (2,)


def test_ranges_that_touch_become_one() -> None:
    assert ranges([(8, 12), (0, 4), (4, 8), (13, 14), (13, 13)]).tolist() == [[0, 12], [13, 14]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 6)), max_size=5))
def test_a_batch_that_touches_bytes_twice_is_seen(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy()
    batch = CopyBatch(*columns)
    written = [address for target, _, nbytes in rows for address in range(target, target + nbytes)]
    read = {address for _, source, nbytes in rows for address in range(source, source + nbytes)}
    twice = {address for address in written if written.count(address) > 1 or address in read}
    found = bytes_of(overlaps(batch))
    assert found <= twice and bool(found) == bool(twice)
    accesses = batch_accesses(batch)
    assert bytes_of(accesses.reads) == read and bytes_of(accesses.writes) == set(written)


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    run_bytes, runs, pages = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    gap = draw(st.integers(0, 3))
    layers = draw(st.integers(1, 3))
    return {
        "layers": [
            LayerPages(
                name=f"layer {index}",
                num_pages=pages,
                offset=draw(st.integers(0, 9)),
                page_stride=runs * (run_bytes + gap),
                run_offsets=tuple(run * (run_bytes + gap) for run in range(runs)),
                run_bytes=run_bytes,
            )
            for index in range(layers)
        ],
        "blocks": draw(st.lists(st.integers(-1, pages - 1), max_size=6, unique_by=lambda b: b if b >= 0 else object())),
        "count": draw(st.none() | st.integers(0, 6)),
        "placed": draw(st.booleans()),
        "first": draw(st.integers(0, layers - 1)),
    }


@given(moves())
def test_declared_writes_are_the_bytes_that_the_kernels_write(move: dict[str, Any]) -> None:
    layers: list[LayerPages] = move["layers"]
    first, chosen = move["first"], len(layers) - move["first"]
    page_bytes, listed = layers[0].page_bytes, len(move["blocks"])
    storages = [torch.zeros(layer.end + 7, dtype=torch.uint8) for layer in layers]
    packed = torch.zeros(len(layers) * (listed + 2) * page_bytes + 1, dtype=torch.uint8)
    blocks = torch.tensor(move["blocks"], dtype=torch.int32)
    options: dict[str, torch.Tensor] = {}
    if move["count"] is not None:
        options["count"] = torch.tensor([move["count"]], dtype=torch.int32)
    if move["placed"]:
        order = torch.randperm(listed) * page_bytes
        options["places"] = order + 1
    tables = bytes_of(spans(blocks, *options.values()))
    stack = PageStack(storages, layers)
    stacked = dict(options)
    if move["placed"]:
        stacked["layer_places"] = torch.arange(len(layers)) * (listed * page_bytes)
        tables |= bytes_of(spans(stacked["layer_places"]))
    storage, layer = storages[first], layers[first]
    launches: list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...], dict[str, torch.Tensor]]] = [
        (gather_pages, scatter_pages, (packed, storage, layer, blocks), (storage, packed, layer, blocks), options),
        (
            gather_layers,
            scatter_layers,
            (packed, stack, first, chosen, blocks),
            (stack, first, chosen, packed, blocks),
            stacked,
        ),
    ]
    for gather, scatter, gathered, scattered, given_options in launches:
        ids = TableCopies().ids
        read, written = (bytes_of(part) for part in ACCESSES[gather](ids, *gathered, **given_options))
        back_read, back_written = (bytes_of(part) for part in ACCESSES[scatter](ids, *scattered, **given_options))
        looked_up = bytes_of(spans(blocks, *given_options.values()))
        assert looked_up <= read and looked_up <= back_read
        assert read - tables == back_written and back_read - tables == written
        for kernel, args, expected in ((gather, gathered, written), (scatter, scattered, back_written)):
            sides = [packed, *storages]
            sources, targets = (storages, [packed]) if kernel is gather else ([packed], storages)
            for memory in sources:
                memory.fill_(1)
            for memory in targets:
                memory.fill_(0)
            kernel(*args, **given_options)
            changed = {
                memory.data_ptr() + offset for memory in targets for offset in torch.nonzero(memory).ravel().tolist()
            }
            assert changed == expected
            assert all(set(memory.tolist()) <= {0, 1} for memory in sides)


def test_a_kernel_is_found_beneath_its_decorators() -> None:
    @functools.wraps(gather_pages)
    def wrapped(*args: object) -> None: ...

    assert declared(functools.wraps(wrapped)(lambda: None), ACCESSES) is ACCESSES[gather_pages]
    assert declared(print, ACCESSES) is None


def test_tables_are_known_by_slices_and_other_views() -> None:
    tables = TableCopies()
    table = torch.full((8,), -99, dtype=torch.int32)
    tables.set(table, range(8))
    assert tables.ids(table[3:5]).tolist() == [3, 4]
    assert tables.ids(table[2:6].view(torch.int64)).tolist() == [2 + (3 << 32), 4 + (5 << 32)]
    tables.set(table[4:6], [40, 50])
    assert tables.ids(table).tolist() == [0, 1, 2, 3, 40, 50, 6, 7]
    assert tables.ids(torch.tensor([7, 8])).tolist() == [7, 8], "what is no table is read where it lies"


def test_what_was_not_told_of_a_table_is_no_page() -> None:
    tables = TableCopies()
    memory = torch.zeros(4, dtype=torch.int32)
    tables.set(memory[1:3], [5, 6])
    assert tables.ids(memory).tolist() == [-1, 5, 6, -1]


def test_copies_of_tables_are_tables() -> None:
    tables = TableCopies()
    table, memory = torch.zeros(4, dtype=torch.int32), torch.zeros(24, dtype=torch.uint8)
    tables.set(table, [1, 2, 3, 4])
    tables.copied(memory[8:24], table.view(torch.uint8))
    assert tables.ids(memory.view(torch.int32)).tolist() == [-1, -1, 1, 2, 3, 4]
    tables.copied(memory[:8], torch.tensor([7, 8], dtype=torch.int32).view(torch.uint8))
    assert tables.ids(memory.view(torch.int32)[:3]).tolist() == [7, 8, 1]
    tables.copied(memory[4:12], torch.empty(8, dtype=torch.uint8, device="meta"))
    assert tables.ids(memory.view(torch.int32)[:4]).tolist() == [7, -1, -1, 2]
    other = torch.zeros(4, dtype=torch.uint8)
    tables.copied(other, torch.zeros(4, dtype=torch.uint8))
    assert len(tables._tables) == 2


def test_a_dropped_table_is_forgotten() -> None:
    tables = TableCopies()
    table = torch.zeros(4, dtype=torch.int32)
    tables.set(table, [1, 2, 3, 4])
    view = table[1:]
    del table
    assert tables.ids(view).tolist() == [2, 3, 4]
    del view
    assert tables._tables == {}


def test_unknown_ids_in_device_memory_are_an_error() -> None:
    with pytest.raises(TransferError, match=r"nobody told; make the table with device\.table"):
        TableCopies().ids(torch.empty(3, dtype=torch.int32, device="meta"))
