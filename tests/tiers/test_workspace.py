from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, TierJob
from layerstream.tiers.workspace import Workspace
from tests.rigs.tier_items import NAMESPACE, make_chain, make_format

SIZES = (512, 96)
CHUNK = 4
FORM = make_format(SIZES, chunk_blocks=CHUNK)


@pytest.fixture(scope="module")
def pool() -> Any:
    """Segments of 8 pages, each page filled with its number and its layer's."""
    pool = HostPool(page_bytes=SIZES, chunk_blocks=CHUNK, budget_bytes=6 * 8192, segment_bytes=8192, touch_threads=1)
    assert pool.pages_per_segment == 8 and pool.pages == 48
    for layer in range(len(SIZES)):
        for page in range(pool.pages):
            pool.span(layer, page, 1).numpy()[:] = 100 * layer + page
    yield pool
    pool.close()


def make_job(objects: int, tail: int, skip: int, runs: list[tuple[int, int]]) -> TierJob:
    return TierJob(
        job_id=1,
        kind=JobKind.PROMOTE,
        tier=0,
        namespace=NAMESPACE,
        chain=(b"before",),
        objects=tuple(make_chain(objects, tail=tail)),
        skip=skip,
        pool_runs=tuple(runs),
        ticket="t",
    )


@settings(max_examples=150)
@given(st.data())
def test_an_item_is_made_of_its_objects_pages_in_order(pool: HostPool, data: st.DataObject) -> None:
    objects, tail, skip = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    left = objects * CHUNK + tail - skip
    runs: list[tuple[int, int]] = []
    while left:
        first = data.draw(st.integers(0, 47))
        runs.append((first, data.draw(st.integers(1, min(left, 48 - first)))))
        left -= runs[-1][1]
    pages = [page for first, count in runs for page in range(first, first + count)]
    job = make_job(objects, tail, skip, runs)
    workspace = Workspace(pool, FORM, threads=2, readers=2, items=9)
    first = data.draw(st.integers(0, len(job.objects) - 1))
    count = data.draw(st.integers(1, len(job.objects) - first))
    batch = workspace.batch(job, first, count, thread=data.draw(st.integers(0, 1)))
    assert batch.chain == (b"before", *(each.key for each in job.objects[:first]))
    assert (batch.namespace, batch.ticket) == (NAMESPACE, "t")
    assert [item.object for item in batch.items] == list(job.objects[first : first + count])
    for number, item in enumerate(batch.items, first):
        skipped = 0 if number else skip
        start = number * CHUNK - (skip if number else 0)
        mine = pages[start : start + item.object.blocks - skipped]
        for layer, size in enumerate(SIZES):
            whole = np.concatenate(item.layers[layer]).reshape(item.object.blocks, size)
            assert [row[0] for row in whole[skipped:]] == [100 * layer + page for page in mine]
            assert all(len(set(row)) == 1 for row in whole[skipped:])


def test_headers_of_all_threads_and_items_are_apart_and_aligned(pool: HostPool) -> None:
    workspace = Workspace(pool, FORM, threads=3, readers=1, items=2)
    headers = [
        item.header
        for thread in range(3)
        for item in workspace.batch(make_job(2, 0, 0, [(0, 8)]), 0, 2, thread=thread).items
    ]
    assert all(header.ctypes.data % 4096 == 0 and header.nbytes == FORM.header_bytes for header in headers)
    for number, header in enumerate(headers):
        header[:] = number
    assert [set(header) for header in headers] == [{number} for number in range(6)]


@pytest.mark.parametrize(("skip", "runs"), [(0, [(0, 7)]), (4, [(0, 4)]), (-1, [(0, 9)])])
def test_a_job_that_cannot_be_is_refused(pool: HostPool, skip: int, runs: list[tuple[int, int]]) -> None:
    workspace = Workspace(pool, FORM, threads=1, readers=1, items=2)
    with pytest.raises(ValueError, match="a job that"):
        workspace.batch(make_job(2, 0, skip, runs), 0, 2, thread=0)


def test_chunks_of_one_block_and_no_threads_need_no_memory(pool: HostPool) -> None:
    form = make_format(SIZES, chunk_blocks=1)
    assert Workspace(pool, form, threads=0, readers=0, items=1).memory.nbytes <= 4096
