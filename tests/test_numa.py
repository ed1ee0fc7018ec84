from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from layerstream.numa import bind_thread, near_cores, parse_cores, pci_address

GPU = "0000:3b:00.0"


def sysfs(root: Path, node: str = "1", **cpulists: str) -> Path:
    (root / "bus/pci/devices" / GPU).mkdir(parents=True)
    (root / "bus/pci/devices" / GPU / "numa_node").write_text(f"{node}\n")
    for name, cpulist in cpulists.items():
        (root / "devices/system/node" / name).mkdir(parents=True)
        (root / "devices/system/node" / name / "cpulist").write_text(f"{cpulist}\n")
    return root


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5, 9, 70})


def test_addresses_are_in_hexadecimal() -> None:
    assert pci_address(0, 59, 0) == GPU
    assert pci_address(0x10000, 255, 31) == "10000:ff:1f.0"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0\n", {0}), ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set()), ("64-65", {64, 65})],
)
def test_lists_of_cores_are_read_as_the_kernel_writes_them(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.usefixtures("allowed")
def test_only_allowed_cores_of_the_devices_node_are_near(tmp_path: Path) -> None:
    root = sysfs(tmp_path, node0="0-3", node1="4-7,9,12")
    assert near_cores(GPU, sysfs=root) == [4, 5, 9]


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("node", "cpulists"),
    [
        ("-1", {"node0": "0-9", "node-1": "0-9"}),
        ("1", {"node0": "0-9"}),
        ("1", {"node1": "10-60"}),
        ("1", {"node1": ""}),
        ("1", {"node1": "all of them"}),
        ("none", {"node1": "0-9"}),
    ],
    ids=["virtual machine", "unknown node", "outside the cpuset", "memory only", "no list", "no number"],
)
def test_where_the_system_does_not_tell_nothing_is_near(tmp_path: Path, node: str, cpulists: dict[str, str]) -> None:
    assert near_cores(GPU, sysfs=sysfs(tmp_path, node, **cpulists)) is None


@pytest.mark.usefixtures("allowed")
def test_an_unknown_device_is_near_to_nothing(tmp_path: Path) -> None:
    assert near_cores("0000:00:00.0", sysfs=sysfs(tmp_path, node1="4")) is None


def bound_to(cores: list[int] | None) -> set[int]:
    """The cores of a thread that was bound to some."""
    seen: set[int] = set()

    def run() -> None:
        bind_thread(cores)
        seen.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def test_a_thread_is_bound_alone() -> None:
    before = os.sched_getaffinity(0)
    assert bound_to([min(before)]) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cores", [None, [], [100_000]])
def test_a_thread_that_cannot_be_bound_stays_as_it_is(cores: list[int] | None) -> None:
    assert bound_to(cores) == os.sched_getaffinity(0)
