from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerstream.cli import plan, tier_plan
from layerstream.errors import ConfigError

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def wide_terminal_and_small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(tier_plan, "TRIED_BYTES", 1 << 20)


def planned(tmp_path: Path, *tiers: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    plan.run(model=tmp_path, kv_dtype="auto", tp=2, pp=1, tokens=32768, block_tokens=16, pool_gib=1.0, tiers=tiers)


def test_a_tier_that_works_gets_its_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, json.dumps({"type": "disk", "path": str(tmp_path / "kv"), "gib": 1}))
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if "disk" in line]
    assert "1 GiB" in row and row.count("GB/s") == 2 and row.rstrip("│ ").endswith("s")
    # 256 tokens of 4 layers of one head of 64, keys and values in bfloat16: 256 KiB a rank and the header of 4 KiB.
    assert f"{(1 << 30) // (2 * (260 << 10)) * 256:,}" in row


def test_a_tier_that_does_not_answer_is_told_beside_those_that_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps({"type": "disk", "path": str(tmp_path / "kv"), "gib": 1})
    full = json.dumps({"type": "disk", "path": str(tmp_path / "small"), "gib": 1 / 2048})
    planned(tmp_path, full, good)
    said = capsys.readouterr().out
    assert "not usable now" in said and said.count("GB/s") == 2


@pytest.mark.parametrize(
    ("tier", "message"),
    [("disk", "not JSON"), ("[]", "one tier is an object"), ('{"type": "dsik"}', "did you mean 'disk'")],
)
def test_what_is_no_tier_is_refused(tier: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, tier)
