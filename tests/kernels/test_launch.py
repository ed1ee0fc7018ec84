from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import launch as launching
from layerstream.kernels.gather import gather_kernel
from layerstream.kernels.launch import launch, launch_bytes
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, HOST_MAX_CTAS
from layerstream.kernels.scatter import scatter_kernel
from layerstream.kernels.stack import PageStack
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


def record(
    layer: LayerPages, listed: int, *, max_ctas: int | None = 512, shift: int = 0, counted: bool = False, **given: Any
) -> Recorder:
    recorder = Recorder()
    table = ids([0] * (listed + shift))[shift:]
    dst, src = noise(max(1, listed) * layer.page_bytes + 256), noise(layer.end + 256)
    launch(recorder, dst, src, layer, table, count=ids([1]) if counted else None, max_ctas=max_ctas, **given)
    return recorder


def record_layers(listed: int, first: int = 0, layers: int = 3, *, page_bytes: int = 1024, **given: Any) -> Recorder:
    layer = dense(page_bytes)
    stack = PageStack([noise(layer.end) for _ in range(5)], [layer] * 5)
    return record(stack.form, listed, stack=stack, first=first, layers=layers, **given)


@pytest.mark.parametrize(
    ("layer", "listed", "tiles"),
    [(dense(16384), 1, 1), (dense(16384), 6, 6), (dense(16384 + 16), 1, 2), (dense(1024), 16, 1), (dense(1024), 17, 2)],
)
def test_no_more_thread_blocks_than_tiles(layer: LayerPages, listed: int, tiles: int) -> None:
    assert record(layer, listed).grids == [(tiles,)]
    assert record(layer, listed, max_ctas=2).grids == [(min(2, tiles),)]


@pytest.mark.parametrize(("listed", "host", "tiles"), [(1, False, 1), (17, False, 2), (17, True, 1), (33, True, 2)])
def test_a_tile_is_of_one_layer(listed: int, host: bool, tiles: int) -> None:
    assert record_layers(listed, host=host).grids == [(3 * tiles,)]
    assert record_layers(listed, host=host, max_ctas=2).grids == [(2,)]


def test_host_memory_is_reached_by_few_thread_blocks_with_more_in_flight() -> None:
    large = dense(16 * 4096, num_pages=2)
    device, host = record(large, 512, max_ctas=None), record(large, 512, max_ctas=None, host=True)
    assert device.grids == [(DEFAULT_MAX_CTAS,)] and host.grids == [(HOST_MAX_CTAS,)]
    in_flight = [kwargs["ROWS"] * kwargs["COLUMNS"] * kwargs["WORD"] for kwargs in (*device.kwargs, *host.kwargs)]
    assert in_flight == [16 * 1024, 32 * 1024]
    assert [device.kwargs[0]["num_warps"], host.kwargs[0]["num_warps"]] == [4, 8]
    assert [device.kwargs[0]["HOST"], host.kwargs[0]["HOST"]] == [False, True]


def test_an_empty_list_launches_nothing() -> None:
    assert record(LAYOUTS["96 bytes"], 0).grids == []


def test_more_segments_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_SEGMENTS", 6)
    assert record(dense(96), 6).grids
    with pytest.raises(GeometryError, match="7 blocks are 7 segments and one launch numbers 6"):
        record(dense(96), 7)
    assert record_layers(2, layers=3).grids
    with pytest.raises(GeometryError, match="2 blocks of 4 layers are 8 segments and one launch numbers 6"):
        record_layers(2, layers=4)


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


@pytest.mark.parametrize("kernel", [gather_kernel, scatter_kernel], ids=["gather", "scatter"])
def test_which_layers_of_a_stack_selects_no_other_kernel(kernel: Any) -> None:
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def key(listed: int, first: int, layers: int, shift: int = 0, **given: Any) -> Any:
        tables = {"places": torch.zeros(listed + 1, dtype=torch.int64)[shift:]}
        tables["layer_places"] = torch.zeros(6, dtype=torch.int64)[shift:]
        recorder = record_layers(listed, first, layers, shift=shift, **tables | given)
        return bind(*recorder.args[0], **recorder.kwargs[0])[1:]

    usual = key(31, 0, 5)
    for listed, first, layers, shift in ((1, 1, 1, 0), (16, 2, 3, 1), (31, 1, 4, 1)):
        assert key(listed, first, layers, shift) == usual
    assert key(31, 0, 5, host=True) != usual
    assert key(31, 0, 5, layer_places=None) != usual
    assert key(31, 0, 5, places=None, layer_places=None) != key(31, 0, 5, layer_places=None)


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
    launch(recorder, dst, src, layer, ids([0, 1]), count=None, max_ctas=1)
    assert recorder.kwargs[0]["WORD"] == word


@pytest.mark.parametrize("distance", [96 * 7 + 16, 96 * 7 + 8, 96 * 7 + 2, 96 * 7 + 1])
def test_words_fit_every_layer_of_a_stack(distance: int) -> None:
    layer, memory = dense(96), noise(2 * 96 * 7 + 64)
    stack = PageStack([memory, memory[distance:]], [layer, layer])
    recorder = record(stack.form, 1, stack=stack, layers=2)
    assert recorder.kwargs[0]["WORD"] == stack.alignment == distance % 96


def test_run_offsets_reach_the_device_in_words_once() -> None:
    layer = LAYOUTS["unequal runs"]
    first, second = (record(layer, 1).args[0][4] for _ in range(2))
    assert torch.equal(first, torch.tensor([0, 3, 9]))
    assert first is second


def test_a_profiler_sees_the_bytes() -> None:
    assert _bytes(record(dense(96), 5)) == 2 * 5 * 96
    assert _bytes(record_layers(5, 1, 3, page_bytes=96)) == 2 * 3 * 5 * 96


def _bytes(recorder: Recorder) -> Any:
    args = dict(zip(gather_kernel.arg_names, recorder.args[0], strict=False)) | recorder.kwargs[0]
    shown = launch_bytes((1,), SimpleNamespace(name="gather"), args)
    assert shown["name"] == "gather"
    return shown["bytes"]


class Compiled:
    """What Triton keeps for one form of a kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


class Jit:
    """A kernel that says how it was launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Compiled:
            self.launches.append((grid, arguments, constants))
            return self.compiled

        return start


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: ("stream", device), raising=False)
    return Jit()


def start(jit: Jit, layer: LayerPages, listed: int, **options: Any) -> None:
    storage, packed = (
        torch.zeros(layer.end, dtype=torch.uint8),
        torch.zeros(listed * layer.page_bytes, dtype=torch.uint8),
    )
    blocks = torch.zeros(listed, dtype=torch.int32)
    launching.launch(jit, packed, storage, layer, blocks, count=options.pop("count", None), max_ctas=None, **options)


def test_a_known_kernel_is_started_without_asking_triton_for_it(jit: Jit) -> None:
    layer = dense(96)
    start(jit, layer, 40)
    assert len(jit.launches) == 1 and jit.compiled.runs == []
    start(jit, layer, 160)
    assert len(jit.launches) == 1
    ((*grid, stream, function, metadata, launch_metadata, enter, leave), arguments) = (
        jit.compiled.runs[0][:9],
        jit.compiled.runs[0][9:],
    )
    (tiles,) = record(layer, 160).grids[0]
    assert tiles > record(layer, 40).grids[0][0]
    assert (grid, stream, function, metadata) == ([tiles, 1, 1], ("stream", None), "function", "metadata")
    assert (launch_metadata, enter, leave) == (None, None, None)
    _, first, constants = jit.launches[0]
    assert len(arguments) == len(first) + len(constants) - 1, "all but num_warps, which is no argument of the kernel"
    assert arguments[10] == 160 and first[10] == 40
    assert list(arguments[13:]) == [value for name, value in constants.items() if name != "num_warps"]


@pytest.mark.parametrize("kernel", [gather_kernel, scatter_kernel], ids=["gather", "scatter"])
def test_constants_come_in_the_order_of_the_kernels_arguments(kernel: Any) -> None:
    jit = Jit()
    start(jit, dense(96), 4)
    constants = [name for name in jit.launches[0][2] if name != "num_warps"]
    assert constants == kernel.arg_names[13:]


def test_what_selects_a_kernel_selects_the_known_one(jit: Jit) -> None:
    count = torch.ones(1, dtype=torch.int32)
    for _ in range(2):
        start(jit, dense(96), 4)
        start(jit, dense(96), 4, count=count)
        start(jit, dense(160), 4)
        start(jit, dense(96), 4, host=True)
    assert len(jit.launches) == 4 and len(jit.compiled.runs) == 4


def test_a_profiler_that_hooks_launches_sees_them(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    start(jit, dense(96), 4)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    start(jit, dense(96), 4)
    assert len(jit.launches) == 2 and jit.compiled.runs == []
