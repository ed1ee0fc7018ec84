"""What the compiler makes of every kernel variant, found without a GPU: `python -m layerstream.kernels.aot`.

Prints registers, spills, shared memory and access widths for each kernel, layout, access width and architecture.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from layerstream.geometry import LayerPages
from layerstream.kernels.gather import gather_kernel
from layerstream.kernels.operands import run_stride
from layerstream.kernels.scatter import scatter_kernel
from layerstream.kernels.segments import NUM_WARPS, WORDS, Tiling, kernel_constants

CAPABILITIES = (80, 90, 100)
"""Ampere, Hopper and Blackwell data-centre parts."""
KERNELS = {"gather": gather_kernel, "scatter": scatter_kernel}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel as a layout and an architecture make it."""

    kernel: str
    """A key of `KERNELS`."""
    layout: LayerPages
    counted: bool
    """Whether the number of pages is read from device memory."""
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
    """Every variant that can be launched on `capabilities`."""
    for capability in capabilities:
        for kernel in KERNELS:
            for word in WORDS:
                for layout in layouts(word):
                    for counted in (False, True):
                        yield Variant(kernel=kernel, layout=layout, counted=counted, capability=capability)


def compile_variant(variant: Variant, **options: Any) -> Compiled:
    """Compile to a binary with the `ptxas` in Triton's wheel and read what it used.

    Args:
        variant: what to compile.
        options: Triton compile options over the shipped ones.
    """
    kernel, layout = KERNELS[variant.kernel], variant.layout
    constants = kernel_constants(layout, Tiling.of(layout.run_bytes, layout.alignment))
    signature = {
        "dst": "*u8",
        "src": "*u8",
        "blocks": "*i32",
        "count": "*i32",
        "run_table": "*i64",
        "num_blocks": "i32",
        "num_pages": "i32",
        "offset_words": "i64",
    }
    absent = {"count": not variant.counted, "run_table": run_stride(layout) is not None}
    constants |= {name: None for name, missing in absent.items() if missing}
    signature |= dict.fromkeys(constants, "constexpr")
    positions = {name: position for position, name in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature, {(positions[name],): value for name, value in constants.items()})
    compiled = triton.compile(
        source, GPUTarget("cuda", variant.capability, 32), options={"num_warps": NUM_WARPS, **options}
    )
    ptx = compiled.asm["ptx"]
    loads, stores = _page_widths(ptx)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        loads=loads,
        stores=stores,
        ptx=ptx,
    )


def report() -> Table:
    """A table with one row for each variant."""
    columns = ("sm", "kernel", "runs", "count", "word", "load", "store", "registers", "spills", "shared")
    table = Table(*columns, box=None)
    for variant in variants():
        result = compile_variant(variant)
        table.add_row(
            str(variant.capability),
            variant.kernel,
            variant.layout.name,
            "device" if variant.counted else "host",
            f"{variant.layout.alignment} B",
            ", ".join(f"{width} B" for width in sorted(result.loads)),
            ", ".join(f"{width} B" for width in sorted(result.stores)),
            str(result.registers),
            f"{result.stack_bytes} B",
            f"{result.shared_bytes} B",
        )
    return table


def _page_widths(ptx: str) -> tuple[frozenset[int], frozenset[int]]:
    """Bytes of each access that loads or stores page bytes. Only these are stored: a load of an id or of a table entry
    fills registers that no store reads."""
    access = r"{}\.global\S*?(?:\.v(\d))?\.b(\d+)\s+{};"
    loads = re.findall(access.format("ld", r"([^\[;]+),\s*\[[^;]+"), ptx)
    stores = re.findall(access.format("st", r"\[[^\]]+\],\s*([^;]+)"), ptx)
    stored = {register for *_, registers in stores for register in re.findall(r"%\w+", registers)}
    widths = [
        frozenset(
            int(vector or 1) * int(bits) // 8
            for vector, bits, registers in accesses
            if stored.intersection(re.findall(r"%\w+", registers))
        )
        for accesses in (loads, stores)
    ]
    return widths[0], widths[1]


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    Console().print(report())
