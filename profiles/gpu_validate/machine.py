"""Where a run took place."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from layerstream.calibration import software

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "numpy", "einops")


def describe(place: torch.device) -> dict[str, Any]:
    """The GPU, its driver and CUDA, or that there is none; processor cores and memory."""
    facts: dict[str, Any] = {"device": "cpu", "driver": "none", "CUDA": str(torch.version.cuda)}
    if place.type == "cuda":
        about = torch.cuda.get_device_properties(place)
        facts |= {
            "device": about.name,
            "driver": software(place)["driver"],
            "GPU memory GiB": round(about.total_memory / 2**30, 1),
            "multiprocessors": about.multi_processor_count,
            "compute capability": f"{about.major}.{about.minor}",
        }
    return facts | {
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }


def slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def commit() -> str:
    """The checked-out commit, marked when files differ from it; "unknown" outside a git checkout."""
    call = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(call, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
