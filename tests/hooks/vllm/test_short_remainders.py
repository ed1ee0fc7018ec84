"""Hits that leave so little to compute that the step looks like one of decoding, and may replay one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.config import CUDAGraphMode

from tests.rigs.fuzz_rig import FuzzRig
from tests.rigs.scheduler_rig import BLOCK

MakeRig = Callable[..., FuzzRig]

MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE)


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("second_runner", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize(
    ("load_mode", "asynchronous"), [("layerwise", False), ("layerwise", True), ("parked", True)], ids=str
)
def test_however_little_a_hit_leaves_its_bytes_are_there_in_every_kind_of_step(
    make_stepping_rig: MakeRig, load_mode: str, asynchronous: bool, second_runner: bool, drafts: int
) -> None:
    rig = make_stepping_rig(
        drafts=drafts, second_runner=second_runner, load_mode=load_mode, asynchronous=asynchronous, slots=24
    )
    for number, left in enumerate(sorted({1, 2, 1 + drafts, 2 + drafts, BLOCK})):
        # Four blocks and what is left: a prompt that ends with a block leaves the whole of it.
        ids = [2 + (number * 131 + i * 37) % 900 for i in range(4 * BLOCK + left)]
        rig.mode = MODES[number % 3]
        rig.add(f"cold {left}", ids, max_tokens=2)
        rig.settle()
        for mode in MODES:
            rig.forget_cached()
            rig.coordinator.take_stats()
            name = f"{mode.name} {left}"
            rig.mode = mode
            rig.add(name, ids, max_tokens=3)
            rig.settle()
            assert rig.wrong == []
            assert rig.coordinator.take_stats().hit_tokens == 4 * BLOCK
            assert rig.requests[name].num_output_tokens == 3
