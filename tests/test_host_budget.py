"""The default size of the host pool, from fake files of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstream import host_budget
from layerstream.errors import PoolError
from layerstream.host_budget import asked_budget, available_memory, default_budget


class Machine:
    """Fake files of a machine with 64 GiB available, for `default_budget`."""

    def __init__(self, root: Path) -> None:
        self.meminfo = root / "meminfo"
        self.own_cgroup = root / "cgroup"
        self.cgroups = root / "fs"
        self.meminfo.write_text(f"MemTotal: {100 << 20} kB\nMemFree: {10 << 20} kB\nMemAvailable: {64 << 20} kB\n")

    def group(self, path: str, **files: str) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(text)

    def available(self) -> int:
        return available_memory(meminfo=self.meminfo, own_cgroup=self.own_cgroup, cgroups=self.cgroups)

    def gib(self, *, local_ranks: int = 1) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_budget, "available_memory", self.available)
            return default_budget(local_ranks=local_ranks) / 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


GIB = 1 << 30


def test_a_quarter_of_what_is_available_shared_between_ranks(machine: Machine) -> None:
    assert machine.gib() == 16
    assert machine.gib(local_ranks=8) == 2


def test_cgroup_v2_limit_less_usage_plus_page_cache(machine: Machine) -> None:
    machine.own_cgroup.write_text("0::/pod/main\n")
    machine.group("pod/main", max=f"{40 * GIB}\n", current=f"{32 * GIB}\n", stat=f"anon 1\ninactive_file {24 * GIB}\n")
    assert machine.gib() == 8


def test_the_tightest_ancestor_counts(machine: Machine) -> None:
    machine.own_cgroup.write_text("0::/pod/main\n")
    machine.group("pod/main", max="max\n", current="5\n", stat="")
    machine.group("pod", max=f"{9 * GIB}\n", current=f"{1 * GIB}\n", stat="")
    machine.group("", max=f"{60 * GIB}\n", current="0\n", stat="")
    assert machine.gib() == 2


def test_a_container_whose_own_group_is_the_mount(machine: Machine) -> None:
    machine.own_cgroup.write_text("0::/kubepods/of/the/host\n")
    machine.group("", max=f"{8 * GIB}\n", current=f"{4 * GIB}\n", stat="")
    assert machine.gib() == 1


def test_cgroup_v1(machine: Machine) -> None:
    machine.own_cgroup.write_text("5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/\n")
    machine.group(
        "memory/docker/abc",
        limit_in_bytes=f"{24 * GIB}\n",
        usage_in_bytes=f"{12 * GIB}\n",
        stat=f"inactive_file 7\ntotal_inactive_file {4 * GIB}\n",
    )
    assert machine.gib() == 4


def test_a_full_cgroup_leaves_nothing(machine: Machine) -> None:
    machine.own_cgroup.write_text("0::/\n")
    machine.group("", max=f"{GIB}\n", current=f"{2 * GIB}\n", stat="")
    assert machine.gib() == 0


@pytest.mark.parametrize("text", ["", "MemAvailable: lots kB\n"])
def test_a_system_that_does_not_say(machine: Machine, text: str) -> None:
    machine.meminfo.write_text(text)
    with pytest.raises(PoolError, match="set host_gib"):
        machine.gib()


def test_a_pool_larger_than_the_available_memory_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_budget, "available_memory", machine.available)
    assert asked_budget(64) == 64 * GIB
    with pytest.raises(PoolError, match=r"host_gib asks for 4000 GiB a rank, and 64\.00 GiB are free"):
        asked_budget(4000)
