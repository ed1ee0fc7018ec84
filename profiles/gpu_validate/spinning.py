"""A kernel that keeps a multiprocessor busy, and touches no memory until its end."""

from __future__ import annotations

import triton
import triton.language as tl

BUSY_BLOCK = 32768
"""Values of a thread block. With 32 warps each thread keeps 32 of them in registers, so that the block needs most of a
multiprocessor's, as a persistent matrix product does."""


@triton.jit  # type: ignore[untyped-decorator]
def busy_kernel(out: tl.tensor, rounds: tl.int32, BLOCK: tl.constexpr) -> None:  # noqa: N803 - constants are in capitals
    """Multiply and add `rounds` times in every thread block; `out` is `float32[blocks * BLOCK]`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = place.to(tl.float32) * 1e-6
    for _ in range(rounds):
        value = value * 0.999 + 1e-3
    tl.store(out + place, value)
