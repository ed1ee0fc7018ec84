from __future__ import annotations

import importlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerstream.backends import PATHS
from layerstream.cli.results import Results as RecordedResults
from layerstream.hooks.vllm.register import NAME
from layerstream.jobs import JobKind, Report
from layerstream.streams.cpu import CpuDevice
from layerstream.tiers.base import Batch, TierStore
from layerstream.tiers.mover import TierMover
from profiles.microbench import device_rig, engine_server, fio, machine, report
from profiles.microbench.counting import CountingDevice, CountingStream
from profiles.microbench.device_rig import LAYERS, DeviceRig
from profiles.microbench.engine_process import EngineSpec
from profiles.microbench.lmcache_ops import NotThereError, lmcache_transfer
from profiles.microbench.results import (
    MAIN,
    SECTIONS,
    TIERS,
    Results,
    Row,
    Section,
    Target,
    markdown,
    read_results,
    section_of,
)
from profiles.microbench.tier_rig import READ_THREADS, WRITE_THREADS, TierRig
from profiles.microbench.turns import compare_all

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
    names = (TIERS.rows[1], "submission: a", "paths: b", "paths: a", MAIN.rows[3], TIERS.rows[0], MAIN.rows[0])
    for name in (*names, "kernels: z"):
        results.add(Row(name=name, samples=[1.0]))
    assert [row.name for row in results.rows] == [
        MAIN.rows[0],
        MAIN.rows[3],
        "kernels: z",
        "paths: b",
        "paths: a",
        "submission: a",
        TIERS.rows[0],
        TIERS.rows[1],
    ]


@pytest.mark.parametrize("name", ["nonsense", "path: a"])
def test_a_row_of_no_part_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown or was measured twice"):
        run().add(Row(name=name))


@pytest.mark.parametrize("name", [MAIN.rows[2], TIERS.rows[0], "paths: a"])
def test_a_row_is_measured_once(name: str) -> None:
    results = run()
    results.add(Row(name=name))
    with pytest.raises(ValueError, match="measured twice"):
        results.add(Row(name=name))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name or "main")
def test_a_section_is_complete_with_every_row_and_something_of_every_part(section: Section) -> None:
    results = run()
    for name in (*section.rows, *(f"{part}x" for part in section.parts)):
        assert not results.complete(section)
        results.add(Row(name=name))
    assert [each for each in SECTIONS if results.complete(each)] == [section]


def test_what_is_written_can_be_compared(tmp_path: Path) -> None:
    results = run()
    results.add(Row.of_pairs("paths: a", [(1.0, 2.0)], note="note"))
    path = results.write(tmp_path, MAIN)
    assert path.name == "2026-11-30-cpu-2core.json"
    assert path.with_suffix(".md").read_text().endswith(markdown(results))
    read = read_results(path)
    assert type(read) is RecordedResults
    assert read.rows == results.rows


def test_sections_are_written_to_files_of_their_own(tmp_path: Path) -> None:
    results = run()
    results.add(Row(name=MAIN.rows[0], samples=[1.0]))
    results.add(Row(name=TIERS.rows[0], samples=[2.0]))
    main, tiers = (results.write(tmp_path, section) for section in (MAIN, TIERS))
    assert tiers.name == "2026-11-30-cpu-2core-tiers.json"
    assert [row.name for row in read_results(main).rows] == [MAIN.rows[0]]
    assert [row.name for row in read_results(tiers).rows] == [TIERS.rows[0]]
    assert (section_of(main), section_of(tiers)) == (MAIN, TIERS)


def test_each_section_has_a_place_of_its_own_on_the_page() -> None:
    page = report.PAGE.read_text()
    for section in SECTIONS:
        page = report.with_table(page, section, f"table of {section.name!r}\n")
    for section in SECTIONS:
        first, last = report.marks(section)
        assert page.count(first) == page.count(last) == 1
        assert page.partition(first)[2].partition(last)[0] == f"\n\ntable of {section.name!r}\n\n"


def test_a_page_without_a_sections_marks_is_refused() -> None:
    first, last = report.marks(TIERS)
    for page in (f"{first} and no more", last, f"{last} before {first}"):
        with pytest.raises(ValueError, match="must contain"):
            report.with_table(page, TIERS, "table")


def test_the_last_run_of_each_section_is_shown() -> None:
    paths = [Path(name) for name in ("2026-11-30-a-tiers.json", "2026-11-30-a.json", "2026-12-01-a.json")]
    assert report.latest(paths) == {"tiers": paths[0], "": paths[2]}


def test_rows_that_share_their_pairs_end_together() -> None:
    rows = [Row(name=name, target=Target(relation="<=", value=1.0)) for name in "ab"]
    noise = itertools.cycle([0.5, 2.0])
    said: list[str] = []
    compare_all(rows, lambda: (1.0, next(noise)), lambda: (2.0, 1.0), 15, said.append)
    assert [len(row.pairs) for row in rows] == [15, 15]
    assert rows[0].samples == [0.5] * 15
    assert set(rows[1].samples) == {0.5, 2.0}
    assert len(said) == 2
    clear = [Row(name=name, target=Target(relation="<=", value=1.0)) for name in "ab"]
    compare_all(clear, lambda: (1.0, 4.0), lambda: (2.0, 1.0), 15, said.append)
    assert [len(row.pairs) for row in clear] == [10, 10]
    assert [row.verdict() for row in clear] == ["met", "missed"]


def test_a_comparison_without_a_target_ends_at_the_first_look() -> None:
    row = Row(name="a")
    compare_all([row], lambda: [1.0], lambda: [2.0], 15, lambda text: None)
    assert len(row.pairs) == 10


@pytest.mark.parametrize("given", [{"host_gib": 2}, {"load_mode": "parked"}])
def test_rates_do_not_decide_what_is_measured(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    used: list[dict[str, Any]] = []
    monkeypatch.setattr(engine_server, "LocalEngine", lambda *_, **arguments: used.append(arguments["options"]))
    for connector in (NAME, "LMCacheMPConnector"):
        engine_server.start(EngineSpec(model="m", max_model_len=1, connector=connector, options=given))
    assert used == [{"load_mode": "layerwise", "recompute": "never", **given}, given]


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


@pytest.mark.parametrize(("device", "kind"), [((254, 0), "ext4"), ((0, 24), "tmpfs"), ((7, 7), "unknown")])
def test_filesystems_are_named(tmp_path: Path, device: tuple[int, int], kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n27 26 0:24 / /dev/shm rw - tmpfs tmpfs rw,size=1k\n"
    )
    path: Any = SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=os.makedev(*device)))
    assert machine.filesystem(path, mounts) == kind


def test_the_kernel_says_what_filesystem_a_folder_is_on(tmp_path: Path) -> None:
    assert machine.filesystem(tmp_path) != "unknown"
    assert machine.filesystem(tmp_path, tmp_path / "missing") == "unknown"


def fio_output(**told: Any) -> str:
    group = {"io_bytes": 8192, "runtime": 250} | told
    return "note: both iodepth >= 1 and synchronous\n" + json.dumps({"jobs": [{"write": group, "read": {}}]})


def test_fio_says_how_long_it_took() -> None:
    assert fio.runtime_s(fio_output(), "write", nbytes=8192) == 0.25
    with pytest.raises(RuntimeError, match="moved 8192 bytes instead of 9000"):
        fio.runtime_s(fio_output(), "write", nbytes=9000)


def test_fio_that_is_not_installed_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fio.FioNotThereError, match="apt-get install fio"):
        fio.Fio(tmp_path, files=2, file_bytes=4096)


def test_fio_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = fio.Fio(tmp_path, files=4, file_bytes=4096)
    with pytest.raises(RuntimeError, match="status 3: no room"):
        tool.seconds("read", jobs=2)
    with pytest.raises(RuntimeError, match="evenly over 3 jobs"):
        tool.seconds("read", jobs=3)
    assert [path.name for path in tool.names(2)] == ["0.0", "1.0", "0.1", "1.1"]


@pytest.fixture
def tier_rig() -> Iterator[TierRig]:
    rig = TierRig(5, page_bytes=PAGE_BYTES)
    yield rig
    rig.close()


def keys_of(batch: Batch) -> tuple[bytes, ...]:
    return (*batch.chain, *(item.object.key for item in batch.items))


@pytest.mark.parametrize("kind", [JobKind.PROMOTE, JobKind.DEMOTE])
def test_parts_are_those_of_the_mover(tier_rig: TierRig, kind: JobKind) -> None:
    names = tier_rig.names(5)
    sealed = tier_rig.sealed(names)
    headers = {item.object.key: item.header.copy() for item in sealed.items}
    handed: list[tuple[bytes, ...]] = []

    class Store(TierStore):
        def read(self, batch: Batch) -> int:
            for item in batch.items:
                item.header[:] = headers[item.object.key]
            return self.write(batch)

        def write(self, batch: Batch) -> int:
            handed.append(keys_of(batch))
            return len(batch.items)

    mover = TierMover([("noting", lambda site: Store())], pool=tier_rig.pool, format=tier_rig.format)
    job, said = tier_rig.job(names, kind), Report()
    mover.submit([job])
    while not mover.poll(said):
        time.sleep(0.001)
    assert mover.close(10)
    assert said.moved == {job.job_id: (1, 5)}
    threads = READ_THREADS if kind is JobKind.PROMOTE else WRITE_THREADS
    assert sorted(map(keys_of, tier_rig.parts(sealed, threads=threads)), key=len) == sorted(handed, key=len)


def test_the_rig_sees_whether_objects_have_come(tier_rig: TierRig) -> None:
    names = tier_rig.names(3)
    kept = [[piece.copy() for piece in item.buffers] for item in tier_rig.sealed(names).items]
    blank = tier_rig.blank(names)
    assert not tier_rig.holds(blank)

    def bring(batch: Batch) -> int:
        for item in batch.items:
            whole = kept[item.object.start // item.object.blocks]
            for piece, bytes_of_it in zip(item.buffers, whole, strict=True):
                piece[:] = bytes_of_it
        return len(batch.items)

    assert tier_rig.move(bring, blank, threads=READ_THREADS) > 0
    assert tier_rig.holds(blank)
    for piece in (blank.items[1].layers[7][0], blank.items[2].header):
        piece[-1] ^= 1
        assert not tier_rig.holds(blank)
        piece[-1] ^= 1
    assert tier_rig.holds(blank)
    with pytest.raises(AssertionError, match="0 of 3 objects"):
        tier_rig.move(lambda batch: 0, blank, threads=WRITE_THREADS)


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
