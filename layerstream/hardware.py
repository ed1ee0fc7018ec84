"""What GPUs and links do by their data sheets or by others' measurements, for planning where nothing was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerstream.errors import ConfigError

PREFILL_UTILISATION = 0.5
"""Part of a GPU's peak that a long prefill reaches; assumed, between the 0.4 and 0.6 of well-tuned dense models."""
DISK_BYTES_PER_S = 6e9
"""Of one NVMe drive on PCIe 4.0 x4, whose raw rate is 7.9 GB/s; assumed."""

_PCIE4 = (25e9, "PCIe 4.0 x16")
_PCIE5 = (50e9, "PCIe 5.0 x16")
_C2C = (346e9, "NVLink-C2C")
_ETHERNET = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gbe|gbit(?:/s)?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Rates of links are what copies between pinned memory and the GPU reach one way: PCIe 4.0 25 GB/s (NVIDIA/nvbandwidth
    issue 53), PCIe 5.0 50 GB/s (vllm-project/vllm pull request 42212), NVLink-C2C 346 GB/s (nvbandwidth issue 23).
    """

    flops: float
    """Floating point operations a second of dense bfloat16 matrix products, by the maker's data sheet."""
    host_bytes_per_s: float
    """From host memory."""
    link: str


GPUS: dict[str, Gpu] = {
    "a10": Gpu(125e12, *_PCIE4),
    "a100": Gpu(312e12, *_PCIE4),
    "b200": Gpu(2250e12, *_PCIE5),
    "gh200": Gpu(990e12, *_C2C),
    "h100": Gpu(989e12, *_PCIE5),
    "h20": Gpu(148e12, *_PCIE5),
    "h200": Gpu(989e12, *_PCIE5),
    "l4": Gpu(121e12, *_PCIE4),
    "l40s": Gpu(362e12, *_PCIE4),
}
"""By the name in lower case."""


def gpu(name: str) -> Gpu:
    """A GPU by its name, in upper or lower case.

    Raises:
        ConfigError: it is not known.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name}: not known; known are {', '.join(GPUS)}")
    return found


def tier_bytes_per_s(name: str) -> float:
    """What a tier's way brings in a second, at most.

    Args:
        name: "disk", or a network by its rate: "25GbE", "400 Gbit/s".

    Raises:
        ConfigError: it is none of these.
    """
    if name.lower() == "disk":
        return DISK_BYTES_PER_S
    network = _ETHERNET.fullmatch(name.strip())
    if network is None or not (gigabits := float(network[1])):
        raise ConfigError(
            f"--tier {name}: not known; allowed are host, disk, a network such as 25GbE or 400GbE, or one entry of the "
            'option `tiers` as JSON, such as {"type": "disk", "path": "/cache"}, which is tried'
        )
    return gigabits * 1e9 / 8
