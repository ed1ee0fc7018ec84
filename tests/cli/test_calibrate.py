"""`layerstream bench --calibrate`, with few and small points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerstream import calibration
from layerstream.calibration import device_name, software
from layerstream.cli.app import main
from layerstream.rate_table import read_rates

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYERSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    monkeypatch.setattr(calibration, "BLOCK_COUNTS", (4, 16))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["layerstream", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_it_prints_draws_and_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--calibrate", "--device", "cpu", "--out", str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    table = read_rates(tmp_path / "cache", device_name(CPU), software(CPU))
    assert table is not None
    for size in table.page_sizes():
        assert f"pages of {size >> 10} KiB: " in said
    assert "zero_copy" in said and "kept in" in said
    assert (tmp_path / "out" / "calibration.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calibrate", "--device", "tpu9"), "--device tpu9: torch knows no such device; use cpu, cuda or cuda:N"),
        (("--calibrate", "--device", "meta"), "--device meta: only cpu and cuda can be measured"),
        (("--calibrate", "--device", "cuda:7"), "--device cuda:7: this machine has 0 CUDA devices"),
        ((), "bench: say one thing to do"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, *arguments) != 0
    said = capsys.readouterr()
    assert message in " ".join((said.out + said.err).split())
    assert "Traceback" not in said.err


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    assert run(monkeypatch, "--calibrate", "--device", "cpu", "--out", str(blocked / "below")) != 0
    said = capsys.readouterr()
    assert "name another folder with --out" in " ".join((said.out + said.err).split())
