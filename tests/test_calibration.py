"""Measuring the paths: here on the CPU device, whose streams are threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstream import calibration
from layerstream.backends import PATHS
from layerstream.calibration import calibrate, device_name, machine_rates, points, software
from layerstream.errors import PoolError, TransferTimeout
from layerstream.host_pool import HostPool
from layerstream.pipeline.base import Move
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.rate_table import RateTable, read_rates
from layerstream.streams.base import Event
from layerstream.streams.costs import Costs
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.virtual import VirtualDevice
from tests.rigs.virtual_rig import KERNELS

CPU = torch.device("cpu")
PAGE = 4096
SECONDS = {"load": 2e-3, "save": 5e-3}
FREE = Costs(copy_bytes_per_s=1e9, copy_latency_s=0.0, row_s=0.0, kernel_latency_s=0.0, launch_s=0.0, event_s=0.0)


class TimedPath:
    """Takes a known time for each layer; its first layer of a direction takes longer, as where kernels compile."""

    def __init__(self, name: str, device: VirtualDevice, cache: PagedCache, calls: list[tuple[str, str]]) -> None:
        self.name, self._device, self._calls, self._first = name, device, calls, {"load", "save"}
        self._stream = device.stream(name, priority=0)
        assert len({layer.offset for layer in cache.layers}) == calibration.LAYERS, "layers have memory of their own"

    def load(self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, done: Event) -> None:
        self._move("load", after, begun, done)

    def save(
        self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, joined: Event, done: Event
    ) -> None:
        self._move("save", after, begun, done)

    def _move(self, direction: str, after: Event, begun: Event, done: Event) -> None:
        self._calls.append((self.name, direction))
        self._stream.wait(after)
        self._stream.record(begun)
        self._device.work(self._stream, 100.0 if direction in self._first else SECONDS[direction])
        self._first.discard(direction)
        self._stream.record(done)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "STAGING_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    monkeypatch.setattr(calibration, "BLOCK_COUNTS", (4, 16))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualDevice]:
    """The device that is measured, in virtual time."""
    device = VirtualDevice(FREE)

    @contextmanager
    def opened(place: torch.device) -> Iterator[Any]:
        yield device, None, KERNELS

    monkeypatch.setattr(calibration, "_opened", opened)
    monkeypatch.setattr(calibration, "_wait", lambda event: device.run())
    yield device
    assert device.close(0.0)


def measure(device: VirtualDevice, patch: pytest.MonkeyPatch) -> tuple[RateTable, list[tuple[str, str]]]:
    """The table, and the (path, direction) of every layer in the order they were moved."""
    calls: list[tuple[str, str]] = []
    patch.setattr(calibration, "open_path", lambda name, *, cache, **_: TimedPath(name, device, cache, calls))
    return calibrate(CPU, page_sizes=(PAGE,), block_counts=(4,)), calls


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


def test_a_rate_is_the_time_of_a_layer_in_its_direction_without_the_first_round(
    timed: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = measure(timed, monkeypatch)
    assert {rate.path for rate in table.rates} == set(PATHS)
    for rate in table.rates:
        assert rate.seconds == pytest.approx(SECONDS[rate.direction])


def test_paths_take_turns(timed: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = measure(timed, monkeypatch)
    turn = [(name, direction) for name in PATHS for direction in SECONDS for _ in range(calibration.LAYERS)]
    assert calls == turn * (1 + calibration.ROUNDS)


def test_without_pinned_memory_a_gpu_measures_staged_transfers_alone(
    timed: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "kind", "cuda")
    table, _ = measure(timed, monkeypatch)
    assert {rate.path for rate in table.rates} == {"staged"}


def test_roofs_are_of_copies_to_and_from_the_device(timed: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[str | None] = []
    engine = timed.engine

    def spy(dst: int, src: int) -> Any:
        engines.append(engine(dst, src))
        return engines[-1]

    elapsed = timed.elapsed

    def slower_to_host(start: Event, end: Event) -> float:
        return elapsed(start, end) * (2 if engines[-1] == "to host" else 1)

    monkeypatch.setattr(timed, "engine", spy)
    monkeypatch.setattr(timed, "elapsed", slower_to_host)
    table, _ = measure(timed, monkeypatch)
    rounds = 1 + calibration.ROUNDS
    assert engines == ["to device"] * rounds + ["to host"] * rounds
    assert table.roofs == pytest.approx({"load": 1e9, "save": 0.5e9})


def test_a_transfer_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "DEADLINE_S", 0.01)
    event: Any = type("Never", (), {"done": lambda self: False})()
    with pytest.raises(TransferTimeout, match="not done after"):
        calibration._wait(event)


def test_measuring_leaves_no_stream_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def telling(kind: Any) -> None:
        close = kind.close

        def spy(self: Any, *timeout: float) -> Any:
            closed.append(kind.__name__)
            return close(self, *timeout)

        monkeypatch.setattr(kind, "close", spy)

    telling(CpuDevice)
    telling(HostPool)
    calibrate(CPU, page_sizes=(PAGE,), block_counts=(4,))
    assert closed == ["HostPool", "HostPool", "CpuDevice"]
