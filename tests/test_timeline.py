from __future__ import annotations

import pytest

from layerstream.timeline import busy_seconds


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(0.0, 1.0), (1.0, 2.0)], 2.0),
        ([(0.0, 1.0), (5.0, 6.0)], 2.0),
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(2.0, 3.0), (0.0, 10.0)], 10.0),
        ([(5.0, 6.0), (0.0, 1.0)], 2.0),
        ([(3.0, 2.0)], 0.0),
    ],
    ids=["none", "one", "in a row", "apart", "over each other", "inside another", "in any order", "backwards"],
)
def test_time_under_way_is_that_of_the_union(spans: list[tuple[float, float]], busy: float) -> None:
    assert busy_seconds(spans) == pytest.approx(busy)
