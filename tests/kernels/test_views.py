from __future__ import annotations

import numpy as np
import pytest

from layerstream.kernels.views import placed
from tests.kernels.pages import ids, noise, offsets


@pytest.mark.parametrize(
    ("blocks", "places", "parts"),
    [
        ([4, 0, 3], [32, 48, 64], [[4, 0, 3]]),
        ([4, 0, 3], [32, 64, 80], [[4], [0, 3]]),
        ([4, 0, 3], [64, 48, 32], [[4], [0], [3]]),
        ([4, 0, 3], [32, 32, 32], [[4], [0], [3]]),
        ([4, -1, 3], [32, 2**61, 48], [[4, 3]]),
        ([-1, -1], [-(2**61), 0], []),
        ([], [], []),
    ],
)
def test_pages_that_lie_together_are_one_part(blocks: list[int], places: list[int], parts: list[list[int]]) -> None:
    memory = noise(128)
    found = list(placed(memory[16:].data_ptr(), ids(blocks).numpy(), offsets(places).numpy(), 16))
    assert [part.tolist() for part, _ in found] == parts
    wanted = [memory[16 + place :][:16] for block, place in zip(blocks, places, strict=True) if block >= 0]
    assert b"".join(view.tobytes() for _, view in found) == b"".join(bytes(page.tolist()) for page in wanted)


def test_parts_share_the_memory() -> None:
    memory = noise(64)
    [(_, view)] = placed(memory.data_ptr(), ids([0]).numpy(), offsets([32]).numpy(), 16)
    view[:] = 7
    assert memory.tolist() == [*noise(32).tolist(), *[7] * 16, *noise(64)[48:].tolist()]
    assert view.dtype == np.uint8 and view.flags.writeable
