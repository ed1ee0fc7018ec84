"""How a page copy starts: which compiled kernel, with what tables, on how many thread blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, HOST_MAX_CTAS, run_stride
from layerstream.kernels.segments import (
    HOST_WORDS_PER_TILE,
    WORDS,
    WORDS_PER_TILE,
    WORDS_PER_WARP,
    Tiling,
    kernel_constants,
)
from layerstream.kernels.stack import PageStack

_MAX_SEGMENTS = 2**30
"""Segments are numbered in 32 bits, and a thread block's last step may count past the end."""

# Nothing that differs between steps, layers or buffers may select another compiled kernel: it would be compiled while
# requests wait. Kernels rely on the word instead, which the layout decides.
NOT_SPECIALIZED = ("first_layer", "num_layers", "num_blocks", "num_pages", "offset_words")
NOT_SPECIALIZED_ON_ALIGNMENT = ("dst", "src", "blocks", "count", "run_table", "places", "layer_starts", "layer_places")

_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels, by what selects them."""


def launch(
    kernel: Any,
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    *,
    count: torch.Tensor | None,
    max_ctas: int | None,
    places: torch.Tensor | None = None,
    host: bool = False,
    stack: PageStack | None = None,
    first: int = 0,
    layers: int = 1,
    layer_places: torch.Tensor | None = None,
) -> None:
    """Start a gather or scatter kernel on the current stream, with no more thread blocks than there are tiles.

    The first launch of a layout on a device compiles it and, for unequally spaced runs, uploads their offsets, which
    waits for the device; one launch with all ids negative does both and moves nothing. Another kernel is compiled for
    every combination of `count`, `places` and `stack` given or not, and of `host`.

    Args:
        layer: the layer, or the form of the stack's layers.
        host: the packed side is host memory.
        stack: move layers `first .. first + layers - 1` of it; the paged side is then its first storage.

    Raises:
        GeometryError: more than 2**30 segments in one launch.
    """
    listed = blocks.numel()
    if listed == 0:
        return
    alignment = _alignment(dst.data_ptr() | src.data_ptr())
    if stack is not None:
        alignment = min(alignment, stack.alignment)
    tiling, constants, run_words = _plan(layer, alignment, host)
    layer_segments = listed * constants["RUNS"] * tiling.segments
    segments = layers * layer_segments
    if segments > _MAX_SEGMENTS:
        of_layers = "" if stack is None else f" of {layers} layers"
        raise GeometryError(
            f"layer {layer.name!r}: {listed} blocks{of_layers} are {segments} segments and one launch numbers "
            f"{_MAX_SEGMENTS}; pass the blocks in several launches"
        )
    if max_ctas is None:
        max_ctas = HOST_MAX_CTAS if host else DEFAULT_MAX_CTAS
    arguments = (
        dst,
        src,
        blocks,
        count,
        run_words and _run_table(run_words, blocks.device),
        places,
        None if stack is None else stack.starts,
        layer_places,
        first,
        layers,
        listed,
        layer.num_pages,
        layer.offset // tiling.word,
    )
    grid = min(max_ctas, layers * -(-layer_segments // tiling.rows))
    _start(kernel, grid, arguments, constants, tiling.rows * tiling.columns // WORDS_PER_WARP)


def _start(kernel: Any, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int) -> None:
    """Launch, by way of the compiled kernel where it is known.

    Finding it through Triton costs the host 18 to 20 of the 29 us that a launch takes with a launcher that does nothing
    (timed on a 2-core AMD EPYC with Triton 3.6 and 3.9). Here nothing selects a kernel but what the key holds, as no
    argument is specialized.
    """
    device = arguments[2].device.index
    # The constants of a plan are one object for as long as the process lives.
    key = (kernel, id(constants), device, tuple(argument is None for argument in arguments[3:8]))
    compiled = _compiled.get(key)
    # Profilers hook launches; they are given all that Triton gives them.
    if compiled is None or triton.knobs.runtime.launch_enter_hook.calls:
        compiled = kernel[(grid,)](*arguments, **constants, num_warps=num_warps)
        # The interpreter compiles nothing.
        if compiled is not None:
            _compiled[key] = compiled
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        grid,
        1,
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *arguments,
        *constants.values(),
    )


def launch_bytes(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """What a profiler shows for a launch: bytes read and written if every listed page moves."""
    page_bytes = args["RUNS"] * args["RUN_BYTES"]
    return {"name": kernel.name, "bytes": 2 * args["num_layers"] * args["num_blocks"] * page_bytes}


@functools.cache
def _plan(
    layer: LayerPages, pointer_alignment: int, host: bool
) -> tuple[Tiling, dict[str, Any], tuple[int, ...] | None]:
    """How to launch for `layer`; the offsets of its runs in words if they are not equally spaced."""
    word = min(layer.alignment, pointer_alignment)
    tiling = Tiling.of(layer.run_bytes, word, HOST_WORDS_PER_TILE if host else WORDS_PER_TILE)
    words = None if run_stride(layer) is not None else tuple(offset // word for offset in layer.run_offsets)
    return tiling, kernel_constants(layer, tiling, host), words


def _alignment(pointers: int) -> int:
    """Largest access width that divides every one of several pointers, given or-ed together."""
    return min(WORDS[0], pointers & -pointers)


@functools.cache
def _run_table(run_words: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`int64[runs]`. Kept for good: a launch still queued may read it, and layouts are few."""
    return torch.tensor(run_words, dtype=torch.int64, device=device)
