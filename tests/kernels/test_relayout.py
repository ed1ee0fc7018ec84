from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import create_function_from_signature

from layerstream.canonical import ChunkForm, PageForm, RowForm
from layerstream.errors import GeometryError
from layerstream.kernels import aot, relayout, relayout_reference
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, HOST_MAX_CTAS
from layerstream.portions import Extent, Portion, rank_heads
from tests.kernels.pages import POISON, noise, poisoned, virtual
from tests.kernels.rows import BLOCKS, CASES, LAYOUTS, ROWS, Cache, Layout, content

ROW = ROWS["2 bytes"]
PAGE = PageForm(name="layer 7", row=ROW, heads=3, splits=2, split_tokens=4, order="snhk")
CHUNK = ChunkForm(row=ROW, heads=5, tokens=30)
KERNEL = relayout.relayout_kernel
PORTION = Portion(heads=2, tokens=13, page_head=1, page_token=3, chunk_head=2, chunk_token=7)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """The Triton kernel run by Triton's interpreter, on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relayout, "relayout_kernel", InterpretedFunction(relayout.relayout_kernel.fn))
        # The interpreter works on CPU tensors in place; copying each back onto itself would touch all of a sparse one.
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        yield relayout


@pytest.fixture(scope="module", params=["triton", "reference"])
def movers(request: pytest.FixtureRequest) -> Any:
    """Both implementations."""
    return request.getfixturevalue("interpreted") if request.param == "triton" else relayout_reference


def filled(nbytes: int, fill: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Memory whose middle is `nbytes` on a multiple of 16, with room on both sides that nobody may touch."""
    memory = fill(nbytes + 64)
    start = 16 + -memory.data_ptr() % 16
    return memory[start : start + nbytes]


def moved(movers: Any, form: PageForm, chunk: ChunkForm, portion: Portion, pages: int, **how: Any) -> None:
    """Move both ways into poisoned memory; compare all of it with the twin, and count what was written."""
    written = portion.heads * portion.tokens * form.row.nbytes
    for name, dst_bytes, src_bytes in (
        ("pages_to_canonical", chunk.nbytes, pages * form.page_bytes),
        ("canonical_to_pages", pages * form.page_bytes, chunk.nbytes),
    ):
        src = filled(src_bytes, noise)
        dst, expected = filled(dst_bytes, poisoned), filled(dst_bytes, poisoned)
        getattr(movers, name)(dst, src, form, chunk, portion, **how)
        getattr(relayout_reference, name)(expected, src, form, chunk, portion)
        everything = [torch.as_tensor(each.untyped_storage(), dtype=torch.uint8) for each in (dst, expected)]
        assert torch.equal(dst, expected)
        assert [int((memory != POISON).sum()) for memory in everything] == [written, written]
        assert torch.equal(src, filled(src_bytes, noise))


@pytest.mark.parametrize(("layout", "row"), CASES.values(), ids=CASES.keys())
def test_bytes_are_those_of_the_twin(interpreted: Any, layout: Layout, row: RowForm) -> None:
    # The interpreter is slow; tests/test_relayout.py has every block size.
    for block_tokens in BLOCKS if layout.splits == 1 else BLOCKS[1::2]:
        form = Cache(layout, content(4, block_tokens, row), row, block_tokens).form
        chunk = ChunkForm(row=row, heads=5, tokens=2 * block_tokens + 3)
        # A slice of the heads, from inside the first page to inside the third.
        tokens = min(10, block_tokens + 1 + block_tokens // 2)
        inside = {"page_token": block_tokens - 1, "chunk_token": 2}
        moved(interpreted, form, chunk, Portion(heads=2, tokens=tokens, page_head=2, chunk_head=1, **inside), 3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_stretch_of_tokens_moves(movers: Any, layout: Layout) -> None:
    row = ROWS["4 bytes"]
    form = Cache(layout, content(2, 4, row), row, 4).form
    chunk = ChunkForm(row=row, heads=2, tokens=12)
    for start, stop in ((0, 12), (0, 0), (4, 8), (1, 2), (3, 4), (1, 11), (7, 12)):
        moved(movers, form, chunk, Portion(heads=2, tokens=stop - start, page_token=start, chunk_token=12 - stop), 3)


@pytest.mark.parametrize("portion", [Portion(heads=0, tokens=4), Portion(heads=3, tokens=0)])
def test_an_empty_portion_moves_nothing(movers: Any, portion: Portion) -> None:
    moved(movers, PAGE, CHUNK, portion, 1)


@pytest.mark.parametrize("max_ctas", [1, 2, 512])
def test_any_number_of_thread_blocks_moves_the_same(interpreted: Any, max_ctas: int) -> None:
    row = ROWS["several segments"]
    form = PageForm(name="large", row=row, heads=4, splits=2, split_tokens=4, order="hsnk")
    moved(interpreted, form, ChunkForm(row=row, heads=4, tokens=24), Portion(heads=4, tokens=24), 3, max_ctas=max_ctas)


@pytest.mark.parametrize("host", ["pages_on_host", "chunk_on_host"])
def test_a_side_on_the_host_moves_the_same(movers: Any, host: str) -> None:
    moved(movers, PAGE, CHUNK, PORTION, 2, **{host: True})


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_buffers_may_start_anywhere(movers: Any, shift: int) -> None:
    src, dst = filled(2 * PAGE.page_bytes + shift, noise), filled(CHUNK.nbytes + shift, poisoned)
    expected = dst.clone()
    movers.pages_to_canonical(dst[shift:], src[shift:], PAGE, CHUNK, PORTION)
    relayout_reference.pages_to_canonical(expected[shift:], src[shift:].clone(), PAGE, CHUNK, PORTION)
    assert torch.equal(dst, expected)


TP_SIZES = (1, 2), (2, 1), (4, 8), (2, 4)


@pytest.mark.parametrize(("blocks", "tp"), list(zip(product(BLOCKS, BLOCKS), cycle(TP_SIZES), strict=False)), ids=str)
def test_chunks_of_one_engine_serve_another(interpreted: Any, blocks: tuple[int, int], tp: tuple[int, int]) -> None:
    """Of other layout, block size and tensor-parallel size: by way of one object for each rank and 64 tokens."""
    random, kv_heads, tokens = Random(repr((blocks, tp))), 4, 64
    layout, row = random.choice([case for name, case in CASES.items() if "several segments" not in name])
    other = random.choice([each for each, of in CASES.values() if of == row])
    kv = content(kv_heads, 2 * tokens, row)
    objects: list[tuple[Extent, torch.Tensor]] = []
    for rank in range(tp[0]):
        first, heads = rank_heads(kv_heads, tp_rank=rank, tp_size=tp[0])
        cache = Cache(layout, kv[first : first + heads], row, blocks[0])
        held = Extent(first_head=first, heads=heads, first_token=0, tokens=2 * tokens)
        for start in (0, tokens):
            extent = Extent(first_head=first, heads=heads, first_token=start, tokens=tokens)
            form = ChunkForm(row=row, heads=heads, tokens=tokens)
            portion = Portion.common(held, extent)
            assert portion is not None
            objects.append((extent, filled(form.nbytes, poisoned)))
            interpreted.pages_to_canonical(objects[-1][1], cache.pages, cache.form, form, portion)
            assert torch.equal(objects[-1][1], kv[first : first + heads, start : start + tokens].flatten())
    # The reader has a small first block already, and reads from inside the first object on.
    start = blocks[1] % 128
    for rank in range(tp[1]):
        first, heads = rank_heads(kv_heads, tp_rank=rank, tp_size=tp[1])
        wanted = Extent(first_head=first, heads=heads, first_token=start, tokens=2 * tokens - start)
        cache = Cache(other, kv[first : first + heads, start:], row, blocks[1])
        pages = filled(cache.pages.numel(), poisoned)
        for extent, stored in objects:
            if (portion := Portion.common(wanted, extent)) is not None:
                form = ChunkForm(row=row, heads=extent.heads, tokens=extent.tokens)
                interpreted.canonical_to_pages(pages, stored, cache.form, form, portion)
        assert torch.equal(pages, cache.pages)


def test_offsets_in_the_chunk_pass_32_bits(movers: Any) -> None:
    row = RowForm(item_bytes=1, key_bytes=1, value_bytes=0)
    page = PageForm(name="far", row=row, heads=2, split_tokens=4, order="snhk")
    far = ChunkForm(row=row, heads=6, tokens=2**30 + 9)
    portion = Portion(heads=2, tokens=4, chunk_head=4, chunk_token=far.tokens - 4)
    chunk, pages = virtual(far.nbytes), noise(page.page_bytes)
    movers.pages_to_canonical(chunk, pages, page, far, portion)
    assert chunk[5 * far.tokens - 4 : 5 * far.tokens].tolist() == pages[0::2].tolist()
    assert chunk[6 * far.tokens - 4 :].tolist() == pages[1::2].tolist()
    assert not chunk[:4096].any()
    back = poisoned(page.page_bytes)
    movers.canonical_to_pages(back, chunk, page, far, portion)
    assert torch.equal(back, pages)


@pytest.mark.parametrize(
    ("order", "heads", "splits", "token"),
    [("snhk", 2**20, 1, 4 * 1025 + 3), ("hsnk", 5, 1, 2**30 - 2), ("nhsk", 3, 2, 2**31 - 3)],
    ids=["page", "head", "token"],
)
def test_offsets_in_the_pages_pass_32_bits(movers: Any, order: str, heads: int, splits: int, token: int) -> None:
    row = RowForm(item_bytes=1, key_bytes=1, value_bytes=0)
    split_tokens = 1025 if order == "snhk" else 2**30
    page = PageForm(name="far", row=row, heads=heads, splits=splits, split_tokens=split_tokens, order=order)
    near = ChunkForm(row=row, heads=1, tokens=2)
    portion = Portion(heads=1, tokens=2, page_head=heads - 1, page_token=token)
    pages, chunk = virtual(-(-(token + 2) // page.tokens) * page.page_bytes), noise(8)[6:]
    movers.canonical_to_pages(pages, chunk, page, near, portion)
    whole, inside = divmod(token, page.tokens)
    split, first = divmod(inside, split_tokens)
    strides = page.strides
    start = whole * page.page_bytes + split * strides["s"] + first * strides["n"] + (heads - 1) * strides["h"]
    assert start > 2**32 and pages[start] == 6 and pages[start + strides["n"]] == 7
    assert not pages[:4096].any()
    back = poisoned(2)
    movers.pages_to_canonical(back, pages, page, near, portion)
    assert back.tolist() == [6, 7]


def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    pages, chunk = noise(2 * PAGE.page_bytes), noise(CHUNK.nbytes)
    meta = torch.empty_like(pages, device="meta")
    return {
        "page type": ({"pages": pages.to(torch.int8)}, "pages is torch.int8"),
        "chunk type": ({"chunk": chunk.view(torch.int16)}, "chunk is torch.int16"),
        "shape": ({"chunk": chunk[None]}, "chunk is torch.uint8 of shape"),
        "strides": ({"pages": noise(4 * PAGE.page_bytes)[::2]}, "pages is torch.uint8 .* and strides"),
        "device": ({"pages": meta}, "pages are on meta and the chunk is on cpu"),
        "host device": ({"pages": meta, "pages_on_host": True}, "said to be on the host is on meta"),
        "two hosts": ({"pages_on_host": True, "chunk_on_host": True}, "both said to be on the host"),
        "no thread blocks": ({"max_ctas": 0}, "max_ctas is 0"),
        "too few pages": ({"pages": pages[:-1]}, "13 tokens of 1 pages from 3 on"),
        "short chunk": ({"chunk": chunk[:-1]}, "7199 bytes for a chunk of 7200"),
    }


@pytest.mark.parametrize("to_chunk", [True, False], ids=["to chunk", "to pages"])
@pytest.mark.parametrize("case", refusals())
def test_operands_that_do_not_fit_are_refused_before_a_byte_moves(movers: Any, case: str, to_chunk: bool) -> None:
    changes, message = refusals()[case]
    given = {"pages": noise(2 * PAGE.page_bytes), "chunk": noise(CHUNK.nbytes)} | changes
    pages, chunk = given.pop("pages"), given.pop("chunk")
    before = [each.clone() for each in (pages, chunk)]
    move, dst, src = (
        (movers.pages_to_canonical, chunk, pages) if to_chunk else (movers.canonical_to_pages, pages, chunk)
    )
    with pytest.raises(GeometryError, match=f"layer 'layer 7': .*{message}"):
        move(dst, src, PAGE, CHUNK, PORTION, **given)
    if "meta" not in (pages.device.type, chunk.device.type):
        assert all(map(torch.equal, before, (pages, chunk)))


def test_the_reference_moves_cpu_memory_alone() -> None:
    pages, chunk = (torch.empty(2**14, dtype=torch.uint8, device="meta") for _ in range(2))
    with pytest.raises(GeometryError, match=r"use layerstream\.kernels\.relayout there"):
        relayout_reference.pages_to_canonical(chunk, pages, PAGE, CHUNK, PORTION)


class Recorder:
    """Stands in for the kernel and keeps how it was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[SimpleNamespace] = []
        monkeypatch.setattr(relayout, "relayout_kernel", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append(SimpleNamespace(grid=grid, args=args, kwargs=kwargs))

    @property
    def grids(self) -> list[tuple[int, ...]]:
        return [each.grid for each in self.launches]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def launch(form: PageForm, chunk: ChunkForm, portion: Portion, *, shift: int = 0, **how: Any) -> None:
    pages = -(-(portion.page_token + portion.tokens) // form.tokens)
    dst, src = filled(chunk.nbytes + shift, noise)[shift:], filled(pages * form.page_bytes, noise)
    relayout.pages_to_canonical(dst, src, form, chunk, portion, **how)


def test_no_more_thread_blocks_than_tiles_and_few_for_host_memory(recorder: Recorder) -> None:
    row = RowForm(item_bytes=2, key_bytes=256, value_bytes=256)
    form = PageForm(name="llama", row=row, heads=8, split_tokens=16, order="snhk")
    for tokens in (4, 5):
        launch(form, ChunkForm(row=row, heads=8, tokens=16), Portion(heads=8, tokens=tokens))
    assert recorder.grids == [(1,), (2,)]
    chunk, portion = ChunkForm(row=row, heads=8, tokens=4096), Portion(heads=8, tokens=4096)
    for how in ({}, {"chunk_on_host": True}, {"pages_on_host": True}, {"max_ctas": 3}):
        launch(form, chunk, portion, **how)
    assert recorder.grids[2:] == [(DEFAULT_MAX_CTAS,), (HOST_MAX_CTAS,), (HOST_MAX_CTAS,), (3,)]
    loads_stores = [(each.kwargs["HOST_LOADS"], each.kwargs["HOST_STORES"]) for each in recorder.launches[2:]]
    assert loads_stores == [(False, False), (False, True), (True, False), (False, False)]
    assert [each.kwargs["num_warps"] for each in recorder.launches[2:]] == [4, 8, 8, 4]


def test_the_widest_word_that_divides_everything_is_used(recorder: Recorder) -> None:
    for name, word in (("several segments", 4), ("2 bytes", 16), ("4 bytes", 8), ("1 byte, odd", 2), ("latent", 8)):
        row = ROWS[name]
        form = PageForm(name=name, row=row, heads=1, split_tokens=2, order="snhk")
        launch(form, ChunkForm(row=row, heads=1, tokens=2), Portion(heads=1, tokens=2))
        assert recorder.launches[-1].kwargs["WORD"] == word, name
    for shift in (1, 2, 4, 8):
        launch(PAGE, CHUNK, PORTION, shift=shift)
        assert recorder.launches[-1].kwargs["WORD"] == shift


@pytest.mark.parametrize("portion", [Portion(heads=0, tokens=4), Portion(heads=3, tokens=0)])
def test_an_empty_portion_launches_nothing(recorder: Recorder, portion: Portion) -> None:
    launch(PAGE, CHUNK, portion)
    assert recorder.grids == []


def test_more_than_can_be_numbered_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayout, "_MAX_SEGMENTS", 26)
    launch(PAGE, CHUNK, PORTION)
    monkeypatch.setattr(relayout, "_MAX_SEGMENTS", 25)
    with pytest.raises(GeometryError, match="26 segments and 30 tokens; one launch numbers 25 and"):
        launch(PAGE, CHUNK, PORTION)
    monkeypatch.setattr(relayout, "_MAX_SEGMENTS", 26)
    monkeypatch.setattr(relayout, "_MAX_TOKENS", 29)
    with pytest.raises(GeometryError, match="30 tokens; one launch numbers 26 and 29; move it in several portions"):
        launch(PAGE, CHUNK, PORTION)
    assert len(recorder.launches) == 1


def test_warming_up_selects_the_kernels_of_both_directions(recorder: Recorder) -> None:
    pages, chunk = filled(2 * PAGE.page_bytes, noise), filled(CHUNK.nbytes, noise)
    relayout.warm_up(pages, chunk, PAGE, chunk_on_host=True)
    launch(PAGE, CHUNK, PORTION, chunk_on_host=True)
    relayout.canonical_to_pages(pages, chunk, PAGE, CHUNK, PORTION, chunk_on_host=True)
    warm_chunk, warm_pages, to_chunk, to_pages = (each.kwargs for each in recorder.launches)
    assert (warm_chunk, warm_pages) == (to_chunk, to_pages)
    assert [each.args[2:4] for each in recorder.launches[:2]] == [(0, 0), (0, 0)]


def test_warming_up_moves_nothing(interpreted: Any) -> None:
    pages, chunk = filled(2 * PAGE.page_bytes, noise), filled(CHUNK.nbytes, noise)
    interpreted.warm_up(pages, chunk, PAGE)
    assert torch.equal(pages, filled(pages.numel(), noise)) and torch.equal(chunk, filled(chunk.numel(), noise))


def test_nothing_that_differs_between_portions_selects_another_kernel(recorder: Recorder) -> None:
    kernel = KERNEL
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    row = ROWS["latent"]
    form = PageForm(name="latent", row=row, heads=17, split_tokens=16, order="snhk")
    for number in (1, 2, 16, 17):
        # Rows of 72 bytes: only addresses that are multiples of 8 are sure, and many are multiples of 16.
        chunk = ChunkForm(row=row, heads=32, tokens=33 + number)
        inside = {"page_token": number, "chunk_token": number - 1, "chunk_head": number - 1}
        launch(form, chunk, Portion(heads=min(number, 16), tokens=number, page_head=1, **inside), shift=8 * number)
    keys = [bind(*each.args, **each.kwargs)[1:] for each in recorder.launches]
    assert keys == keys[:1] * 4
    assert len(set(map(str, keys))) == 1
    launch(PAGE, CHUNK, PORTION)
    other = recorder.launches[-1]
    assert bind(*other.args, **other.kwargs)[1:] != keys[0]


def test_every_variant_uses_its_word_and_spills_nothing() -> None:
    seen = set()
    for variant in aot.relayout_variants([90]):
        compiled = aot.compile_relayout(variant)
        assert compiled.loads == compiled.stores == {variant.word}, variant
        assert compiled.stack_bytes == 0 and compiled.shared_bytes == 0, variant
        # Of the 65,536 registers of a multiprocessor, so that five blocks of 128 threads fit, of which the largest grid
        # needs four, or two of 256 threads.
        assert compiled.registers <= 96, variant
        assert compiled.load_cache == ({".cg"} if variant.host and not variant.to_chunk else {""}), variant
        assert compiled.store_cache == ({".cs"} if variant.host and variant.to_chunk else {""}), variant
        seen.add((variant.word, variant.page.parts, variant.to_chunk, variant.host))
    assert len(seen) == 4 * (len(aot.TABLED_WORDS) + 1)


def test_the_report_lists_the_relayout(monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(aot.relayout_variants([90]))[:2]
    monkeypatch.setattr(aot, "relayout_variants", lambda: iter(few))
    table = aot.relayout_report()
    assert table.row_count == 2
    assert [list(column.cells) for column in table.columns][1:5] == [
        ["relayout"] * 2,
        ["snhk"] * 2,
        ["to chunk", "to chunk host"],
        ["16 B"] * 2,
    ]


def test_a_profiler_is_told_how_many_bytes_move() -> None:
    args = {"heads": 2, "tokens": 3, "PARTS": 2, "PART_BYTES": 16}
    assert relayout.launch_bytes((1,), SimpleNamespace(name="relayout_kernel"), args) == {
        "name": "relayout_kernel",
        "bytes": 2 * 2 * 3 * 32,
    }
