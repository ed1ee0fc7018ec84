from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerstream.backends import PATHS
from layerstream.cli.results import Results as RecordedResults
from layerstream.streams.cpu import CpuDevice
from profiles.microbench import device_rig, machine
from profiles.microbench.counting import CountingDevice, CountingStream
from profiles.microbench.device_rig import LAYERS, DeviceRig
from profiles.microbench.lmcache_ops import NotThereError, lmcache_transfer
from profiles.microbench.results import PARTS, ROWS, Results, Row, markdown, read_results

PAGE_BYTES = 4096
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the rig takes the GPU where there is one")


def run(**others: Any) -> Results:
    facts: dict[str, Any] = {
        "started": datetime(2026, 11, 30, tzinfo=UTC),
        "settings": {},
        "machine": {"kind": "cpu-2core"},
        "versions": {"torch": "2"},
        "commit": "abc",
    }
    return Results(**{**facts, **others})


def test_rows_stand_in_the_order_of_the_table_whatever_order_they_were_measured_in() -> None:
    results = run()
    for name in ("submission: a", "paths: b", "paths: a", ROWS[3], "kernels: z", ROWS[0]):
        results.add(Row(name=name, samples=[1.0]))
    assert [row.name for row in results.rows] == [
        ROWS[0],
        ROWS[3],
        "kernels: z",
        "paths: b",
        "paths: a",
        "submission: a",
    ]


@pytest.mark.parametrize("name", ["nonsense", "path: a"])
def test_a_row_of_no_part_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown or was measured twice"):
        run().add(Row(name=name))


@pytest.mark.parametrize("name", [ROWS[2], "paths: a"])
def test_a_row_is_measured_once(name: str) -> None:
    results = run()
    results.add(Row(name=name))
    with pytest.raises(ValueError, match="measured twice"):
        results.add(Row(name=name))


def test_a_run_is_complete_with_every_row_and_something_of_every_part() -> None:
    results = run()
    for name in (*ROWS, *(f"{part}x" for part in PARTS)):
        assert not results.complete
        results.add(Row(name=name))
    assert results.complete


def test_what_is_written_can_be_compared(tmp_path: Path) -> None:
    results = run()
    results.add(Row.of_pairs("paths: a", [(1.0, 2.0)], note="note"))
    path = results.write(tmp_path)
    assert path.name == "2026-11-30-cpu-2core.json"
    assert path.with_suffix(".md").read_text().endswith(markdown(results))
    read = read_results(path)
    assert type(read) is RecordedResults
    assert read.rows == results.rows


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n"
    )
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "DRIVER_FILE", driver)
    found = machine.describe_machine()
    assert found["kind"] == "nvidia-h200"
    assert found["GPU"] == "NVIDIA H200"
    assert found["compute capability"] == "9.0"
    assert found["GPU memory GiB"] == 141.0
    assert found["driver"] == "580.95.05"
    assert found["CUDA"] == "13.0"


@pytest.mark.parametrize("content", [None, "nothing of the kind"])
def test_an_unknown_driver_is_said_to_be_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "version").write_text(content)
    assert machine.driver_version(tmp_path / "version") == "unknown"


@needs_no_gpu
def test_without_a_gpu_the_kind_counts_cores() -> None:
    found = machine.describe_machine()
    assert found["kind"] == f"cpu-{found['cores']}core"
    assert "GPU" not in found


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRig]:
    monkeypatch.setitem(device_rig.LAYER_BYTES, "cpu", 8 * PAGE_BYTES)
    rig = DeviceRig(PAGE_BYTES)
    yield rig
    rig.close()


@needs_no_gpu
@pytest.mark.parametrize("direction", ["load", "save"])
@pytest.mark.parametrize("name", PATHS)
def test_the_rig_sees_whether_a_path_has_moved_the_bytes(rig: DeviceRig, name: str, direction: str) -> None:
    rig.differ()
    assert not rig.is_exact()
    assert rig.transfer(rig.path(name), direction) > 0
    assert rig.is_exact()
    rig.page(LAYERS - 1, rig.count - 1)[0][-1] += 1
    assert not rig.is_exact()


@needs_no_gpu
@pytest.mark.parametrize("direction", ["load", "save"])
def test_copies_of_single_pages_move_the_same_bytes(rig: DeviceRig, direction: str) -> None:
    rig.differ()
    rig.timed(lambda stream: rig.page_copies(stream, direction))
    assert rig.is_exact()
    rig.differ()
    for layer in range(LAYERS):
        batch = rig.batch_of(layer, direction)
        rig.timed(lambda stream, batch=batch: stream.copy_batch(batch))  # type: ignore[misc]
    assert rig.is_exact()


@needs_no_gpu
def test_plain_copies_move_as_many_bytes(rig: DeviceRig) -> None:
    rig.differ()
    rig.timed(lambda stream: rig.plain_copies(stream, "load"))
    assert all(torch.equal(rig.storages[layer][: rig.layer_bytes], rig.host(layer)) for layer in range(LAYERS))


@needs_no_gpu
def test_lmcache_that_cannot_be_imported_is_said_to_be_missing(rig: DeviceRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(NotThereError, match=r"cannot be imported: no lmcache\.lmcache_native"):
        lmcache_transfer(rig, "load")


def test_everything_that_is_queued_is_counted() -> None:
    device = CountingDevice(CpuDevice())
    stream = device.stream("a", priority=0)
    assert isinstance(stream, CountingStream)
    event, memory = device.event(), device.empty(16)
    graph = device.capture(stream, lambda: None)
    assert device.counts.total() == 0
    stream.record(event)
    stream.wait(event)
    stream.copy(memory[:8], memory[8:])
    stream.launch(lambda: None)
    stream.replay(graph)
    device.table([1])
    assert device.counts == {"record": 1, "wait": 1, "copy": 1, "launch": 1, "replay": 1, "table": 1}
    assert device.close(10.0)
