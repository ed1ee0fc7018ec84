from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from layerstream import host_budget
from layerstream.cli import plan
from layerstream.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """First cell of each row -> its other cells."""
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def planned(tmp_path: Path, config: dict[str, Any], **changes: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {
        "kv_dtype": "auto",
        "tp": 1,
        "pp": 1,
        "tokens": 8192,
        "block_tokens": 16,
        "pool_gib": 4.0,
    }
    plan.run(model=tmp_path, **{**options, **changes})


def test_llama_8b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, LLAMA_8B)
    table = rows(capsys)
    assert table["per token"] == ["128 KiB"]
    assert table["per block of 16 tokens"] == ["2 MiB"]
    assert table["per sequence of 8,192 tokens"] == ["1 GiB"]
    assert table["host pool (as given)"] == ["4 GiB"]
    assert table["tokens that fit"] == ["32,768"]
    assert table["sequences that fit"] == ["4"]


def test_several_ranks_show_one_and_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, LLAMA_8B, tp=2, pp=2)
    table = rows(capsys)
    assert table[""] == ["one rank", "all 4 ranks"]
    assert table["layers"] == ["16", "32"]
    assert table["per token"] == ["32 KiB", "128 KiB"]
    assert table["host pool (as given)"] == ["4 GiB", "16 GiB"]


def test_the_pool_defaults_to_what_this_machine_gives_each_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def default_budget(*, local_ranks: int) -> int:
        return 12 * plan.GIB // local_ranks

    monkeypatch.setattr(host_budget, "default_budget", default_budget)
    planned(tmp_path, LLAMA_8B, tp=2, pp=2, pool_gib=None)
    assert rows(capsys)["host pool (this machine's default)"] == ["3 GiB", "12 GiB"]


def test_a_pool_smaller_than_one_block_is_refused_with_the_size_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold one block of 2 MiB; use --pool-gib 0\.00195 or more"):
        planned(tmp_path, LLAMA_8B, pool_gib=0.001)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, False),
        ({"model_type": "mistral", "sliding_window": 4096}, True),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, False),
    ],
)
def test_that_the_pool_keeps_what_windows_have_passed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], warned: bool
) -> None:
    planned(tmp_path, {**LLAMA_8B, **changes})
    assert ("The host pool keeps all layers of every block" in capsys.readouterr().out) is warned


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        (3 << 50, "3,072 TiB"),
        ((1 << 20) - 1, "1,024 KiB"),
    ],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert plan.size(nbytes) == text
