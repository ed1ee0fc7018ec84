from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import segments
from layerstream.kernels.gather import gather_kernel
from layerstream.kernels.scatter import scatter_kernel
from layerstream.kernels.segments import WORDS, WORDS_PER_TILE, Tiling, launch, launch_bytes
from tests.kernels.pages import LAYOUTS, dense, ids, noise


class Recorder:
    """Stands in for a kernel and keeps how it was launched."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.args: list[tuple[Any, ...]] = []
        self.kwargs: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)

        def call(*args: Any, **kwargs: Any) -> None:
            self.args.append(args)
            self.kwargs.append(kwargs)

        return call


def record(layer: LayerPages, listed: int, *, max_ctas: int = 512, shift: int = 0, counted: bool = False) -> Recorder:
    recorder = Recorder()
    table = ids([0] * (listed + shift))[shift:]
    dst, src = noise(max(1, listed) * layer.page_bytes + 256), noise(layer.end + 256)
    launch(recorder, dst, src, layer, table, ids([1]) if counted else None, max_ctas)
    return recorder


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("run_words", [1, 3, 31, 32, 41, 656, 1024, 1152, 4096, 6144])
def test_tiles_are_full_and_waste_little(run_words: int, word: int) -> None:
    tiling = Tiling.of(run_words * word, word)
    assert tiling.rows * tiling.columns == WORDS_PER_TILE
    covered = tiling.segments * tiling.columns
    assert covered - tiling.columns < run_words <= covered
    if run_words % 32 == 0 or run_words > 8 * 32:
        assert 8 * (covered - run_words) <= covered


@pytest.mark.parametrize(("run_bytes", "columns"), [(16384, 1024), (65536, 1024), (18432, 256), (10496, 64), (656, 64)])
def test_segments_are_as_long_as_waste_allows(run_bytes: int, columns: int) -> None:
    assert Tiling.of(run_bytes, 16).columns == columns


@pytest.mark.parametrize(
    ("layer", "listed", "tiles"),
    [(dense(16384), 1, 1), (dense(16384), 6, 6), (dense(16384 + 16), 1, 2), (dense(1024), 16, 1), (dense(1024), 17, 2)],
)
def test_no_more_thread_blocks_than_tiles(layer: LayerPages, listed: int, tiles: int) -> None:
    assert record(layer, listed).grids == [(tiles,)]
    assert record(layer, listed, max_ctas=2).grids == [(min(2, tiles),)]


def test_an_empty_list_launches_nothing() -> None:
    assert record(LAYOUTS["96 bytes"], 0).grids == []


def test_more_segments_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_SEGMENTS", 6)
    assert record(dense(96), 6).grids
    with pytest.raises(GeometryError, match="7 blocks are 7 segments and one launch numbers 6"):
        record(dense(96), 7)


@pytest.mark.parametrize("kernel", [gather_kernel, scatter_kernel], ids=["gather", "scatter"])
def test_nothing_that_differs_between_steps_selects_another_kernel(kernel: Any) -> None:
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def keys(layer: LayerPages, **how: Any) -> list[Any]:
        recorder = record(layer, **how)
        return [bind(*args, **kwargs)[1:] for args, kwargs in zip(recorder.args, recorder.kwargs, strict=True)]

    def pages(num_pages: int, offset: int) -> LayerPages:
        return dense(96, num_pages=num_pages, offset=offset)

    usual = keys(pages(1000, 32), listed=31)
    for listed in (1, 2, 16, 17):
        assert keys(pages(1000, 32), listed=listed) == usual
    for shift in (1, 2, 3):
        assert keys(pages(1000, 32), listed=31, shift=shift) == usual
    for num_pages, offset in ((1, 0), (16, 16), (17, 1616)):
        assert keys(pages(num_pages, offset), listed=1) == usual
    assert keys(pages(1000, 32), listed=31, counted=True) != usual


def test_an_offset_past_32_bits_selects_the_same_kernel() -> None:
    bind = create_function_from_signature(
        gather_kernel.signature, gather_kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    recorder = record(dense(96), 1)
    args, kwargs = list(recorder.args[0]), recorder.kwargs[0]
    usual = bind(*args, **kwargs)[1:]
    args[gather_kernel.arg_names.index("offset_words")] = 2**33
    assert bind(*args, **kwargs)[1:] == usual


@pytest.mark.parametrize(("dst_shift", "src_shift", "word"), [(0, 0, 16), (8, 0, 8), (16, 4, 4), (2, 8, 2), (0, 1, 1)])
def test_words_fit_the_buffers(dst_shift: int, src_shift: int, word: int) -> None:
    layer, recorder = dense(96), Recorder()
    dst, src = noise(2 * 96 + dst_shift)[dst_shift:], noise(layer.end + src_shift)[src_shift:]
    launch(recorder, dst, src, layer, ids([0, 1]), None, 1)
    assert recorder.kwargs[0]["WORD"] == word


def test_run_offsets_reach_the_device_in_words_once() -> None:
    layer = LAYOUTS["unequal runs"]
    first, second = (record(layer, 1).args[0][4] for _ in range(2))
    assert torch.equal(first, torch.tensor([0, 3, 9]))
    assert first is second


def test_a_profiler_sees_the_bytes() -> None:
    recorder = record(dense(96), 5)
    args = dict(zip(gather_kernel.arg_names, recorder.args[0], strict=False)) | recorder.kwargs[0]
    assert launch_bytes((1,), SimpleNamespace(name="gather"), args) == {"name": "gather", "bytes": 2 * 5 * 96}
