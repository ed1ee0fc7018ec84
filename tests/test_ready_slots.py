from __future__ import annotations

import pytest

from layerstream.errors import PoolError
from layerstream.ready_slots import ReadySlots


def test_without_growth_all_slots_may_be_used() -> None:
    assert ReadySlots(8, None, world_size=3).usable == 8


def test_the_rank_with_the_fewest_decides_and_none_ever_has_fewer() -> None:
    slots = ReadySlots(8, {0: 2, 1: 4}, world_size=2)
    seen = [slots.usable]
    for ready in ({0: 3}, {0: 1}, {0: 20}, {1: 20}):
        slots.update(ready)
        seen.append(slots.usable)
    assert seen == [2, 3, 3, 4, 8]
    assert slots.planned == 8


@pytest.mark.parametrize("planned", [0, -1])
def test_a_pool_without_slots_is_refused(planned: int) -> None:
    with pytest.raises(PoolError, match="raise host_gib"):
        ReadySlots(planned, None, world_size=1)


@pytest.mark.parametrize("ready", [{}, {0: 1}, {0: 1, 1: 1, 2: 1}])
def test_every_rank_is_named(ready: dict[int, int]) -> None:
    with pytest.raises(PoolError, match="there are 2 ranks"):
        ReadySlots(8, ready, world_size=2)
