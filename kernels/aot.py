"""What the compiler makes of every kernel variant, found without a GPU: `python -m layerstream.kernels.aot`.

Prints registers, spills, shared memory, access widths and cache modifiers for each kernel, form, layout, access width
and architecture; of the relayout for each direction, order of rows and access width.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from layerstream.canonical import PageForm, RowForm
from layerstream.geometry import LayerPages
from layerstream.kernels.gather import gather_kernel
from layerstream.kernels.operands import run_stride
from layerstream.kernels.relayout import NOT_SPECIALIZED as RELAYOUT_NUMBERS
from layerstream.kernels.relayout import relayout_constants, relayout_kernel
from layerstream.kernels.scatter import scatter_kernel
from layerstream.kernels.segments import (
    HOST_WORDS_PER_TILE,
    WORDS,
    WORDS_PER_TILE,
    WORDS_PER_WARP,
    Tiling,
    kernel_constants,
)

CAPABILITIES = (80, 90, 100)
"""Ampere, Hopper and Blackwell data-centre parts."""
KERNELS = {"gather": gather_kernel, "scatter": scatter_kernel}
TABLED_WORDS = (16, 8, 1)
"""Access widths of the forms with tables that are worth compiling: of two elements, of one, and of one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a launch is given, where that selects another kernel."""

    counted: bool = True
    """The number of pages is read from device memory."""
    placed: bool = False
    """A table says where packed pages lie."""
    stacked: bool = False
    """Several layers, with a table of where they lie; with `placed` another of where their packed pages lie."""
    host: bool = False
    """The packed side is host memory."""

    def __str__(self) -> str:
        given = {"places": self.placed, "stack": self.stacked, "host": self.host, "count": self.counted}
        return " ".join(name for name, is_given in given.items() if is_given) or "plain"


PLAIN = (Form(counted=False), Form())
"""One layer, packed pages one behind another in device memory."""
TABLED = (
    Form(placed=True),
    Form(stacked=True),
    Form(stacked=True, placed=True),
    Form(placed=True, host=True),
    Form(stacked=True, placed=True, host=True),
)
"""Each table alone, all of them, and the forms that reach the host pool: all that add a piece of code to the kernel. A
host number of pages only takes an instruction away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel as a form, a layout and an architecture make it."""

    kernel: str
    """A key of `KERNELS`."""
    form: Form
    layout: LayerPages
    capability: int
    """Compute capability times 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made of a variant, for one thread where that matters."""

    registers: int
    stack_bytes: int
    """Where spilled registers go; 0 means none spilled."""
    shared_bytes: int
    loads: frozenset[int]
    """Widths in bytes of the accesses that read pages; ids and tables aside."""
    stores: frozenset[int]
    load_cache: frozenset[str]
    """Cache modifiers of the same loads, such as `.cg`; empty text for none."""
    store_cache: frozenset[str]
    ptx: str


def layouts(word: int) -> list[LayerPages]:
    """Pages whose widest access is `word`: with equally spaced runs, and with unequally spaced ones.

    Runs of 656 words need short segments and a masked end, which costs more registers than any round size.
    """
    return [
        LayerPages(
            name=name,
            num_pages=1000,
            offset=word,
            page_stride=4001 * word,
            run_offsets=tuple(run * word for run in runs),
            run_bytes=656 * word,
        )
        for name, runs in (("equal", (0, 801)), ("unequal", (0, 801, 2003)))
    ]


def variants(capabilities: Sequence[int] = CAPABILITIES) -> Iterator[Variant]:
    """Plain forms at every access width and layout; forms with tables at the widest width, at the one of a single
    element, at the narrowest, and with the layout that needs one table more."""
    for capability in capabilities:
        for kernel in KERNELS:
            for word in WORDS:
                for layout in layouts(word):
                    tabled = TABLED if word in TABLED_WORDS and run_stride(layout) is None else ()
                    for form in PLAIN + tabled:
                        yield Variant(kernel=kernel, form=form, layout=layout, capability=capability)


def compile_variant(variant: Variant, **options: Any) -> Compiled:
    """Compile to a binary with the `ptxas` in Triton's wheel and read what it used.

    Args:
        variant: what to compile.
        options: Triton compile options over the shipped ones.
    """
    kernel, layout, form = KERNELS[variant.kernel], variant.layout, variant.form
    words = HOST_WORDS_PER_TILE if form.host else WORDS_PER_TILE
    constants = kernel_constants(layout, Tiling.of(layout.run_bytes, layout.alignment, words), form.host)
    signature = {
        "dst": "*u8",
        "src": "*u8",
        "blocks": "*i32",
        "count": "*i32",
        "run_table": "*i64",
        "places": "*i64",
        "layer_starts": "*i64",
        "layer_places": "*i64",
        "first_layer": "i32",
        "num_layers": "i32",
        "num_blocks": "i32",
        "num_pages": "i32",
        "offset_words": "i64",
    }
    absent = {
        "count": not form.counted,
        "run_table": run_stride(layout) is not None,
        "places": not form.placed,
        "layer_starts": not form.stacked,
        "layer_places": not (form.stacked and form.placed),
    }
    constants |= {name: None for name, missing in absent.items() if missing}
    return _compile(kernel, signature, constants, variant.capability, {"num_warps": words // WORDS_PER_WARP, **options})


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayoutVariant:
    """The relayout as a direction, a layout and an architecture make it."""

    to_chunk: bool
    host: bool
    """One side is host memory: the chunk."""
    page: PageForm
    word: int
    """Bytes of one access."""
    capability: int
    """Compute capability times 10."""

    def __str__(self) -> str:
        return ("to chunk" if self.to_chunk else "to pages") + (" host" if self.host else "")


def relayout_variants(capabilities: Sequence[int] = CAPABILITIES) -> Iterator[RelayoutVariant]:
    """Both directions, with rows in one piece and in two: at the widest width, at the one of a single element, and at
    the narrowest; with the chunk in host memory at the widest, which takes the most registers.

    Parts of 71 words need short segments and a masked end; three heads of two kernel blocks of five tokens need every
    division there is.
    """
    for capability in capabilities:
        for word in TABLED_WORDS:
            for parts, order in ((1, "snhk"), (2, "kshn")):
                row = RowForm(item_bytes=1, key_bytes=71 * word, value_bytes=71 * word * (parts - 1))
                page = PageForm(name=order, row=row, heads=3, splits=2, split_tokens=5, parts=parts, order=order)
                for to_chunk in (True, False):
                    for host in (False, True) if word == WORDS[0] else (False,):
                        yield RelayoutVariant(to_chunk=to_chunk, host=host, page=page, word=word, capability=capability)


def compile_relayout(variant: RelayoutVariant, **options: Any) -> Compiled:
    """As `compile_variant`, of the relayout."""
    tiling, constants = relayout_constants(
        variant.page,
        variant.word,
        to_chunk=variant.to_chunk,
        loads=variant.host and not variant.to_chunk,
        stores=variant.host and variant.to_chunk,
    )
    signature = {"dst": "*u8", "src": "*u8"} | dict.fromkeys(RELAYOUT_NUMBERS, "i32")
    warps = tiling.rows * tiling.columns // WORDS_PER_WARP
    return _compile(relayout_kernel, signature, constants, variant.capability, {"num_warps": warps, **options})


def _compile(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    options: Mapping[str, Any],
) -> Compiled:
    positions = {name: position for position, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        {(positions[name],): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options=dict(options))
    ptx = compiled.asm["ptx"]
    loads, stores = _page_accesses(ptx)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        loads=frozenset(width for width, _ in loads),
        stores=frozenset(width for width, _ in stores),
        load_cache=frozenset(cache for _, cache in loads),
        store_cache=frozenset(cache for _, cache in stores),
        ptx=ptx,
    )


def report() -> Table:
    """A table with one row for each variant."""
    columns = ("sm", "kernel", "runs", "form", "word", "load", "store", "registers", "spills", "shared")
    table = Table(*columns, box=None)
    for variant in variants():
        result = compile_variant(variant)
        table.add_row(
            str(variant.capability),
            variant.kernel,
            variant.layout.name,
            str(variant.form),
            f"{variant.layout.alignment} B",
            *_columns(result),
        )
    return table


def relayout_report() -> Table:
    """As `report`, of the relayout."""
    columns = ("sm", "kernel", "rows", "form", "word", "load", "store", "registers", "spills", "shared")
    table = Table(*columns, box=None)
    for variant in relayout_variants():
        result = compile_relayout(variant)
        table.add_row(
            str(variant.capability),
            "relayout",
            variant.page.name,
            str(variant),
            f"{variant.word} B",
            *_columns(result),
        )
    return table


def _columns(result: Compiled) -> tuple[str, ...]:
    """The columns from "load" on."""
    return (
        _accesses(result.loads, result.load_cache),
        _accesses(result.stores, result.store_cache),
        str(result.registers),
        f"{result.stack_bytes} B",
        f"{result.shared_bytes} B",
    )


def _accesses(widths: frozenset[int], caches: frozenset[str]) -> str:
    return " ".join([*(f"{width} B" for width in sorted(widths)), *sorted(caches)]).rstrip()


def _page_accesses(ptx: str) -> tuple[frozenset[tuple[int, str]], frozenset[tuple[int, str]]]:
    """Bytes and cache modifier of each access that loads or stores page bytes. Only these are stored: a load of an id
    or of a table entry fills registers that no store reads."""
    access = r"{}\.global(\.c\w)?(?:\.v(\d))?\.b(\d+)\s+{};"
    loads = re.findall(access.format("ld", r"([^\[;]+),\s*\[[^;]+"), ptx)
    stores = re.findall(access.format("st", r"\[[^\]]+\],\s*([^;]+)"), ptx)
    stored = {register for *_, registers in stores for register in re.findall(r"%\w+", registers)}
    accesses = [
        frozenset(
            (int(vector or 1) * int(bits) // 8, cache)
            for cache, vector, bits, registers in found
            if stored.intersection(re.findall(r"%\w+", registers))
        )
        for found in (loads, stores)
    ]
    return accesses[0], accesses[1]


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    Console().print(report())
    Console().print(relayout_report())
