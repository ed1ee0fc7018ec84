"""Which cores are near a PCI device, as Linux's sysfs tells, and threads bound to them.

Linux places a memory page on the NUMA node of the core that first writes to it, so a thread bound to a GPU's cores
places host memory where that GPU's copies reach it without crossing to another socket.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def pci_address(domain: int, bus: int, device: int) -> str:
    """The name of a PCI device in sysfs, `domain:bus:device.function` in hexadecimal; a GPU is its function 0.

    The numbers are what CUDA calls `pciDomainID`, `pciBusID` and `pciDeviceID`.
    """
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def near_cores(address: str, *, sysfs: Path = Path("/sys")) -> list[int] | None:
    """Cores of a PCI device's NUMA node that the calling thread may use, ascending.

    Args:
        address: the device's name in sysfs (`pci_address`).
        sysfs: where it is mounted.

    Returns:
        None if the system does not tell (a virtual machine says node -1), or allows none of them.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        cores = parse_cores((sysfs / f"devices/system/node/node{node}/cpulist").read_text()) if node >= 0 else set()
    except (OSError, ValueError):
        return None
    return sorted(cores & os.sched_getaffinity(0)) or None


def parse_cores(text: str) -> set[int]:
    """The cores of a list as the kernel writes it: `0-3,8,10-11`, empty for none.

    Raises:
        ValueError: the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_thread(cores: Collection[int] | None) -> None:
    """Keep the calling thread on `cores`. Without any, or where the system allows none of them, nothing changes."""
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
