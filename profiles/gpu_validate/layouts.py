"""Page layouts that the kernels are checked and measured on."""

from __future__ import annotations

from layerstream.geometry import LayerPages


def spaced(
    name: str, pages: int, run_bytes: int, *, runs: int = 1, run_stride: int = 0, page_stride: int = 0, offset: int = 0
) -> LayerPages:
    """Pages of equally spaced runs; one behind another unless `page_stride` says otherwise."""
    return LayerPages(
        name=name,
        num_pages=pages,
        offset=offset,
        page_stride=page_stride or runs * run_bytes,
        run_offsets=tuple(run * (run_stride or run_bytes) for run in range(runs)),
        run_bytes=run_bytes,
    )


def serving_layouts(pages: int) -> tuple[LayerPages, ...]:
    """What attention backends keep: pages of 16 tokens unless the name says otherwise."""
    return (
        spaced("Llama-8B bf16", pages, 65536),
        spaced("Llama-8B bf16, K and V planes", pages, 32768, runs=2, run_stride=pages * 32768, page_stride=32768),
        spaced("Llama-8B bf16, TP4", pages, 16384),
        spaced("Llama-8B bf16, heads outermost", pages, 4096, runs=16, run_stride=pages * 4096, page_stride=4096),
        spaced("MLA bf16, 1152 B a token", pages, 18432),
        spaced("MLA fp8, 656 B a token, 64 tokens", pages, 41984),
        spaced("MLA fp8, pages of one row of 656 B", pages, 656, offset=48),
        spaced("32 layers in one block, layer 3", pages, 16384, page_stride=32 * 16384, offset=3 * 16384),
    )


RATED = 5
"""So many of them, from the first, have 16-token pages in one layer's memory, for which there is a target."""


def odd_layouts(pages: int) -> tuple[LayerPages, ...]:
    """What nobody should need and everybody can have: accesses narrower than 16 bytes, unequal runs, far pages."""
    return (
        spaced("words of 8 bytes", pages, 40, page_stride=56, offset=8),
        spaced("words of 4 bytes", pages, 4 * 129, page_stride=4 * 130, offset=4),
        spaced("words of 2 bytes", pages, 6, page_stride=10, offset=2),
        spaced("words of 1 byte", pages, 3, offset=1),
        LayerPages(
            name="unequal runs",
            num_pages=pages,
            offset=16,
            page_stride=8192,
            run_offsets=(0, 1024, 5120),
            run_bytes=656,
        ),
        LayerPages(
            name="pages past 4 GiB",
            num_pages=pages,
            offset=16,
            page_stride=2**32 // (pages - 1) // 16 * 16 + 32,
            run_offsets=(0, 2**20),
            run_bytes=4096,
        ),
    )


def far_layout(word: int) -> LayerPages:
    """Pages of which the last lies past 2**31 of the elements that a kernel counts in: of `word` bytes, at most 8."""
    element = min(word, 8)
    return LayerPages(
        name=f"words of {word}",
        num_pages=3,
        offset=word,
        page_stride=element * 2**30 + 16 * 9,
        run_offsets=(0, element * 2**29),
        run_bytes=16 * word,
    )
