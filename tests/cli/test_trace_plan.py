from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerstream.capacity import kv_capacity
from layerstream.cli.app import app
from layerstream.cli.trace_plan import FACTORS, POLICY_NAMES, outcomes_of, print_trace
from layerstream.errors import ConfigError
from layerstream.policies import LRU
from layerstream.prefill_cost import prefill_cost
from layerstream.replay import BlockPool, replay
from layerstream.request_trace import read_trace

HEAD = Path(__file__).parents[1] / "data" / "conversation_trace_head.jsonl"
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def planned(config: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(config), "--out", str(config.parent / "pictures"), *arguments])


def test_a_trace_is_served_by_pools_around_the_one_asked_about(config: Path) -> None:
    done = planned(config, "--trace", str(HEAD), "--pool-gib", "32")
    assert done.exit_code == 0, done.output
    assert "conversation_trace_head.jsonl: 300 requests" in done.output
    cells = [re.split(r"\s*│\s*", line)[1:-1] for line in done.output.splitlines() if line.startswith("│")]
    table = {row[0]: row[1:] for row in cells if len(row) == 2 + 2 * len(POLICY_NAMES)}
    assert list(table) == ["8 GiB", "16 GiB", "32 GiB", "64 GiB", "128 GiB"]
    trace, cost = read_trace(HEAD, block_tokens=512), prefill_cost(MODEL)
    hits = replay(trace, BlockPool(512, LRU()))
    tokens, flops = trace.input_tokens.sum(), cost.flops(trace.input_tokens).sum()
    expected = f"{hits.sum() * 512 / tokens:.1%}", f"{cost.flops(hits * 512).sum() / flops:.1%}"
    at = 1 + 2 * POLICY_NAMES.index("lru")
    assert (table["32 GiB"][0], *table["32 GiB"][at : at + 2]) == ("262,144", *expected)
    picture = config.parent / "pictures" / "conversation_trace_head-pools.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name in done.output


def test_sizes_that_are_the_same_chunks_are_shown_once(config: Path) -> None:
    done = planned(config, "--trace", str(HEAD), "--pool-gib", "0.0625")
    assert done.exit_code == 0, done.output
    sizes = re.findall(r"^│ +([\d.]+ MiB) │ +\d", done.output, re.MULTILINE)
    assert sizes == ["64 MiB", "128 MiB", "256 MiB"]


def test_blocks_smaller_than_a_chunk_are_served_by_the_products_own_index(config: Path, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 33 * 16 + 1, "hash_ids": list(range(34))},
        {"timestamp": 1, "input_length": 33 * 16 + 1, "hash_ids": [*range(33), 99]},
    ]
    trace = tmp_path / "small.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = planned(config, "--trace", str(trace), "--trace-block-tokens", "16", "--pool-gib", "1")
    assert done.exit_code == 0, done.output
    (row,) = re.findall(r"│ +1 GiB │ +8,192 │(.*)│", done.output)
    assert [cell.strip() for cell in row.split("│")] == ["49.9%", "49.9%"] * len(POLICY_NAMES)


def test_a_damaged_line_is_one_error(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text(HEAD.read_text().splitlines()[0] + "\n{}\n")
    done = planned(config, "--trace", str(trace), "--pool-gib", "1")
    assert isinstance(done.exception, ConfigError)
    assert re.search(r"bad\.jsonl:2: .*missing required field", str(done.exception))


def test_a_trace_that_is_not_there_is_one_error(config: Path, tmp_path: Path) -> None:
    done = planned(config, "--trace", str(tmp_path / "none.jsonl"), "--pool-gib", "1")
    assert isinstance(done.exception, ConfigError)
    assert "none.jsonl cannot be read" in str(done.exception)


def test_a_pool_smaller_than_a_block_of_the_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold 512 tokens.*use --pool-gib 0\.0625 or more"):
        print_trace(HEAD, kv_capacity(MODEL), prefill_cost(MODEL), pool_bytes=1 << 20, block_tokens=512, out=tmp_path)


def test_a_model_whose_prefill_cannot_be_told_is_refused(config: Path) -> None:
    config.write_text(json.dumps({**MODEL, "intermediate_size": 0.5}))
    done = planned(config, "--trace", str(HEAD), "--pool-gib", "1")
    assert isinstance(done.exception, ConfigError)
    assert "what a prefill costs cannot be told" in str(done.exception)
    assert planned(config, "--pool-gib", "1").exit_code == 0


def test_processes_of_their_own_find_the_same_and_tell_of_all_requests() -> None:
    trace, cost = read_trace(HEAD, block_tokens=512), prefill_cost(MODEL)
    sizes = [100, 400]
    said: list[int] = []
    alone = outcomes_of(trace, cost, sizes=sizes, chunk_blocks=1, progress=said.append, processes=1)
    assert sum(said) == len(trace) * len(sizes) * len(POLICY_NAMES)
    said.clear()
    apart = outcomes_of(trace, cost, sizes=sizes, chunk_blocks=1, progress=said.append, processes=2)
    assert sum(said) == len(trace) * len(sizes) * len(POLICY_NAMES)
    assert apart == alone
    assert len(alone) == len(sizes) * len(POLICY_NAMES)
    assert 1.0 in FACTORS
