from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.pipeline.choice import PathChoice

SMALL, LARGE, SAVE = (SimpleNamespace(name=name) for name in ("small", "large", "save"))


@pytest.mark.parametrize(("blocks", "path"), [(1, SMALL), (63, SMALL), (64, LARGE), (10**6, LARGE)])
def test_a_load_takes_the_path_of_its_size(blocks: int, path: Any) -> None:
    choice = PathChoice(loads=[(0, SMALL), (64, LARGE)], save=SAVE)
    assert choice.load(blocks) is path
    assert choice.save is SAVE
