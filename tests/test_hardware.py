from __future__ import annotations

import pytest

from layerstream.errors import ConfigError
from layerstream.hardware import GPUS, gpu, tier_bytes_per_s


def test_a_gpu_is_found_in_either_case() -> None:
    assert gpu("H100") is gpu("h100") is GPUS["h100"]


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--gpu h1000: not known; known are .*h100"):
        gpu("h1000")


@pytest.mark.parametrize("name", ["400GbE", "400gbe", "400 Gbit/s", "400Gbit"])
def test_a_network_is_named_by_its_rate(name: str) -> None:
    assert tier_bytes_per_s(name) == 50e9


def test_a_gibibyte_over_400_gigabits_takes_at_least_21_ms_and_a_half() -> None:
    assert (1 << 30) / tier_bytes_per_s("400GbE") == pytest.approx(21.5e-3, rel=2e-3)


@pytest.mark.parametrize("name", ["", "floppy", "0GbE", "GbE", "25", "x25GbE"])
def test_what_is_no_tier_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed are host, disk, a network such as 25GbE"):
        tier_bytes_per_s(name)
