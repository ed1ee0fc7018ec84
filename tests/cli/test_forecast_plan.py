from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from layerstream.cli import plan
from layerstream.cli.forecast_plan import parse_tokens
from layerstream.errors import ConfigError
from layerstream.rate_table import RateTable

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LAYERSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, list[str]]:
    """First cell of each row -> its other cells."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options: dict[str, Any] = {
        "kv_dtype": "auto", "tp": 1, "pp": 1, "tokens": 8192, "block_tokens": 16, "pool_gib": 4.0, "gpu": "h100",
    }  # fmt: skip
    plan.run(model=tmp_path, **{**options, **changes})
    out = capsys.readouterr().out
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in out[out.index("A hit of") :].splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def milliseconds(cell: str) -> float:
    number, unit = cell.removeprefix("at least ").split()
    return float(number.replace(",", "")) * {"ms": 1.0, "s": 1000.0}[unit]


def test_blocks_and_chunks_of_a_model_of_128_kib_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plan.run(model=tmp_path, kv_dtype="auto", tp=1, pp=1, tokens=8192, block_tokens=16, pool_gib=4.0)
    out = capsys.readouterr().out
    assert re.search(r"per block of 16 tokens\s+│\s+2 MiB", out)
    assert re.search(r"per chunk of 256 tokens\s+│\s+32 MiB", out)


def test_a_gibibyte_over_400_gigabits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = forecast(tmp_path, capsys, prompt="16k", hit=0.5, tiers=["400GbE"])
    assert table["to load, each GPU"][0] == "1 GiB"
    assert table["400GbE to host memory"] == ["at least 21.5 ms", "400GbE at 50 GB/s (assumed), shared by all GPUs"]


def test_every_number_of_hardware_is_marked_as_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = forecast(tmp_path, capsys, prompt="32k", tiers=["disk"])
    for row in ("disk to host memory", "host memory to GPU", "compute the hit instead"):
        assert "(assumed)" in table[row][1]


def test_times_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = forecast(tmp_path, capsys, prompt="32k")
    link, hit, rest = (
        milliseconds(table[row][0]) for row in ("host memory to GPU", "compute the hit instead", "compute the rest")
    )
    assert milliseconds(table["first token, all computed"][0]) == pytest.approx(hit + rest, rel=0.01)
    assert milliseconds(table["first token, loaded first"][0]) == pytest.approx(link + rest, rel=0.01)
    layerwise = milliseconds(table["first token, layer by layer"][0])
    assert layerwise == pytest.approx(link / 32 + rest, rel=0.01)
    assert table["worth loading"][0] == "yes"
    assert table["what takes longest"][0] == "computing the rest"


def test_a_slow_way_is_not_worth_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = forecast(tmp_path, capsys, prompt="4k", tiers=["10GbE"])
    assert table["worth loading"][0] == "no"
    assert table["what takes longest"][0] == "10GbE"


def test_two_gpus_load_half_each_over_their_own_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = forecast(tmp_path, capsys, prompt="32k", tiers=["25GbE"])
    two = forecast(tmp_path, capsys, prompt="32k", tiers=["25GbE"], tp=2)
    assert milliseconds(two["host memory to GPU"][0]) == pytest.approx(
        milliseconds(one["host memory to GPU"][0]) / 2, rel=0.01
    )
    assert two["25GbE to host memory"] == one["25GbE to host memory"]


def test_a_calibration_of_such_a_gpu_is_used(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RateTable(device="NVIDIA H100 80GB HBM3", software={}, roofs={"load": 40e9, "save": 30e9}, rates=()).write(cache)
    (cache / "rates-0.json").write_text("{")
    assert forecast(tmp_path, capsys)["host memory to GPU"][1] == "PCIe 5.0 x16 at 40 GB/s (calibrated here)"
    assert "(assumed)" in forecast(tmp_path, capsys, gpu="h200")["host memory to GPU"][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None, "prompt": "4k"}, "add --gpu"),
        ({"gpu": None, "hit": 0.5}, "add --gpu"),
        ({"gpu": None, "tiers": ["disk"]}, "not JSON .* or add --gpu"),
        ({"gpu": "abacus"}, "known are"),
        ({"tiers": ["disk", "host"]}, "name one"),
        ({"tiers": ["tape"]}, "allowed are host"),
        ({"hit": 1.5}, "from 0 to 1"),
        ({"hit": float("nan")}, "from 0 to 1"),
        ({"hit": 0.0}, "not a whole block"),
        ({"prompt": "16", "hit": 1.0}, "not a whole block"),
        ({"prompt": "many"}, "a number of tokens is needed"),
        ({"prompt": "0"}, "a number of tokens is needed"),
        ({"pp": 2}, "leave out --pp"),
    ],
)
def test_what_cannot_be_forecast_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        forecast(tmp_path, capsys, **changes)


def test_tokens_may_be_written_short() -> None:
    assert [parse_tokens(text) for text in ("4000", "32k", "1M")] == [4000, 32768, 1 << 20]
