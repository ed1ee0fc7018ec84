"""Measuring the paths: here on the CPU device, whose streams are threads."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstream import calibration
from layerstream.backends import PATHS
from layerstream.calibration import calibrate, device_name, machine_rates, points, software
from layerstream.errors import PoolError
from layerstream.rate_table import RateTable, read_rates

CPU = torch.device("cpu")
PAGE = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "STAGING_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    monkeypatch.setattr(calibration, "BLOCK_COUNTS", (4, 16))


def test_every_path_is_measured_both_ways_at_every_point() -> None:
    told: list[tuple[int, int]] = []
    table = calibrate(
        CPU, page_sizes=(PAGE, 4 * PAGE), block_counts=(4, 16), progress=lambda done, of: told.append((done, of))
    )
    assert {(r.path, r.direction, r.page_bytes, r.blocks) for r in table.rates} == {
        (path, direction, page, blocks)
        for path in PATHS
        for direction in ("load", "save")
        for page in (PAGE, 4 * PAGE)
        for blocks in (4, 16)
    }
    assert all(r.seconds > 0 for r in table.rates)
    assert min(table.roofs.values()) > 0
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert table.device == "cpu"
    assert table.software["torch"] == torch.__version__


def test_points_fit_the_scratch_memory() -> None:
    assert [tuple(point) for point in points((1 << 14, 1 << 17), (1, 4, 16, 64))] == [
        (1 << 14, 1),
        (1 << 14, 4),
        (1 << 14, 16),
        (1 << 17, 1),
    ]


def test_a_page_size_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "points", lambda sizes, counts: points(sizes, (4,)))
    first = machine_rates(CPU, PAGE, tmp_path)
    assert first is not None and first.page_sizes() == [PAGE]
    both = machine_rates(CPU, 2 * PAGE, tmp_path)
    assert both is not None and both.page_sizes() == [PAGE, 2 * PAGE]
    assert set(first.rates) < set(both.rates)

    def never(*args: object, **kwargs: object) -> RateTable:
        raise AssertionError("measured twice")

    monkeypatch.setattr(calibration, "calibrate", never)
    assert machine_rates(CPU, PAGE, tmp_path) == both
    assert read_rates(tmp_path, device_name(CPU), software(CPU)) == both


def test_ranks_take_turns_and_measure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "points", lambda sizes, counts: points(sizes, (4,)))
    running, together, measured = [0], [0], []
    real = calibration.calibrate

    def watched(*args: Any, **kwargs: Any) -> RateTable:
        running[0] += 1
        together[0] = max(together[0], running[0])
        measured.append(1)
        time.sleep(0.02)
        running[0] -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(calibration, "calibrate", watched)
    with ThreadPoolExecutor(4) as ranks:
        tables = list(ranks.map(lambda _: machine_rates(CPU, PAGE, tmp_path), range(4)))
    assert together == [1] and len(measured) == 1
    assert tables[0] is not None and all(table == tables[0] for table in tables)


@pytest.mark.parametrize("error", [PoolError("no memory"), RuntimeError("CUDA out of memory"), MemoryError()])
def test_what_cannot_be_measured_is_said_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def broken(*args: object, **kwargs: object) -> RateTable:
        raise error

    monkeypatch.setattr(calibration, "calibrate", broken)
    assert machine_rates(CPU, PAGE, tmp_path) is None
    assert "could not measure its transfer paths" in caplog.text
    assert "loads are staged" in caplog.text
    assert not list(tmp_path.glob("*.json"))


def test_pages_too_large_to_measure_are_not(tmp_path: Path) -> None:
    assert machine_rates(CPU, 1 << 19, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_kept_is_still_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "points", lambda sizes, counts: points(sizes, (4,)))
    caplog.set_level(logging.INFO)
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    table = machine_rates(CPU, PAGE, blocked / "below")
    assert table is not None
    assert "not kept, so that the next start measures again" in caplog.text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12\n", "580.65.06"),
        ("nothing of the kind\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_driver_is_read_from_the_kernel_module(tmp_path: Path, text: str | None, version: str) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert calibration._driver_version(file) == version
