from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.decisions import LoadMode
from layerstream.forecast import Forecast

seconds = st.floats(1e-6, 10.0)


def of(**changes: float) -> Forecast:
    return Forecast(**{"layers": 4, "load_s": 0.4, "compute_s": 0.4, "recompute_s": 4.0, **changes})  # type: ignore[arg-type]


def pipelined(forecast: Forecast) -> float:
    """Layer by layer, as it happens."""
    computed = 0.0
    for layer in range(1, forecast.layers + 1):
        arrived = forecast.tier_s + layer * forecast.load_s / forecast.layers
        computed = max(computed, arrived) + forecast.compute_s / forecast.layers
    return computed


@given(st.integers(1, 40), seconds, seconds, seconds)
def test_layer_by_layer_is_what_a_pipeline_of_two_takes(layers: int, load: float, compute: float, tier: float) -> None:
    forecast = of(layers=layers, load_s=load, compute_s=compute, tier_s=tier)
    assert forecast.layerwise_s == pytest.approx(pipelined(forecast))
    assert max(load, compute) + tier <= forecast.layerwise_s * (1 + 1e-9)
    assert forecast.layerwise_s <= forecast.whole_s * (1 + 1e-9)


@pytest.mark.parametrize(("recompute_s", "worth"), [(5e-3, False), (200e-3, True)])
def test_a_gibibyte_over_400_gigabits_is_worth_200_ms_of_computing_and_not_5(recompute_s: float, worth: bool) -> None:
    forecast = of(layers=32, load_s=(1 << 30) / 50e9, compute_s=1e-3, recompute_s=recompute_s)
    assert (forecast.saved_s > 0) is worth


def test_what_takes_longest_is_named() -> None:
    assert of(load_s=9.0).bottleneck == "link"
    assert of(compute_s=9.0).bottleneck == "compute"
    assert of(tier_s=9.0).bottleneck == "tier"


def test_a_load_that_computing_cannot_hide_is_parked_beside_others_only() -> None:
    slow = of(load_s=1.0)
    assert slow.mode(running=0) == (LoadMode.LAYERWISE, None)
    mode, layer = slow.mode(running=3)
    assert mode is LoadMode.PARKED
    assert layer is not None
