"""How much host memory a pool takes when nobody says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from layerstream.errors import PoolError

BUDGET_SHARE = 0.25
"""Part of the available memory that the ranks of one machine take together when nobody says how much."""


def available_memory(
    *,
    meminfo: Path = Path("/proc/meminfo"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Bytes this process could still take without pushing anything out.

    The least of MemAvailable and, for the process's cgroup and each of its ancestors, limit - usage + inactive page
    cache (the kernel drops that first; a freshly read checkpoint fills it).

    Args:
        meminfo: where the kernel says what is free.
        own_cgroup: where it says which cgroup this process is in.
        cgroups: where the cgroup file system is mounted (v2, or v1 with its `memory` folder).

    Raises:
        PoolError: the system does not say how much memory is available.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError) as error:
        raise PoolError(f"{meminfo} does not tell how much memory is available ({error!r}); set host_gib") from error
    return min([available, *_cgroup_headroom(own_cgroup, cgroups)])


def default_budget(*, local_ranks: int) -> int:
    """Bytes for one rank's pool when `host_gib` is not set: a quarter of the available memory, shared between ranks.

    Args:
        local_ranks: ranks on this machine that make a pool each.

    Raises:
        PoolError: the system does not say how much memory is available.
    """
    return int(available_memory() * BUDGET_SHARE) // local_ranks


def asked_budget(host_gib: float) -> int:
    """Bytes for one rank's pool when `host_gib` is set.

    Raises:
        PoolError: that is more than the available memory: the pool would end the process once it filled.
    """
    budget, available = int(host_gib * (1 << 30)), available_memory()
    if budget > available:
        raise PoolError(
            f"LayerStream: host_gib asks for {host_gib:g} GiB a rank, and {available / (1 << 30):.2f} GiB are free; "
            "ask for less, or leave it out for a quarter of that"
        )
    return budget


def _cgroup_headroom(own_cgroup: Path, cgroups: Path) -> list[int]:
    """Bytes that each limited cgroup around this process could still give it; empty outside any limit.

    Interface files: the kernel's admin-guide/cgroup-v2.rst (Memory) and cgroup-v1/memory.rst.
    """
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return []
    headroom = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # A container may see its host's path while its own group is mounted at the root: missing folders are skipped.
        names = Path(path).parts[1:]
        for folder in (mount.joinpath(*names[:depth]) for depth in range(len(names) + 1)):
            with suppress(OSError, ValueError):
                free = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                headroom.append(max(0, free + int(stat.get(cache, 0))))
    return headroom
