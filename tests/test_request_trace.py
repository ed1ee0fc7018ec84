from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerstream.errors import ConfigError
from layerstream.request_trace import read_trace

HEAD = Path(__file__).parent / "data" / "conversation_trace_head.jsonl"


def line(ids: list[int], tokens: int, at: float = 0, **more: Any) -> str:
    return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids, **more})


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_are_their_whole_blocks_and_the_last_tokens_block_is_never_hit(tmp_path: Path) -> None:
    trace = read_trace(
        written(tmp_path, line([70, 71, 72], 25), line([70, 71], 20), line([9], 5), line([], 0)), block_tokens=10
    )
    assert list(trace.prompts()) == [([0, 1], 2), ([0, 1], 1), ([], 0), ([], 0)]
    assert (len(trace), trace.distinct, trace.input_tokens.tolist()) == (4, 2, [25, 20, 5, 0])


def test_a_published_trace_is_read() -> None:
    said: list[int] = []
    trace = read_trace(HEAD, block_tokens=512, progress=said.append)
    assert len(trace) == 300
    assert sum(said) == HEAD.stat().st_size
    first = json.loads(HEAD.read_text().splitlines()[0])
    assert len(next(trace.prompts())[0]) == first["input_length"] // 512


def test_more_fields_than_needed_are_passed_over(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, line([1], 10, user="x")), block_tokens=10)) == 1


GOOD = line([1, 2], 20, 5)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"timestamp": 6}', "missing required field `input_length`"),
        (line([1, "x"], 20, 6), r"Expected `int`, got `str` - at `\$.hash_ids\[1\]`"),  # type: ignore[list-item]
        (line([1, 2], 20, 4), "timestamp 4 comes after 5; a trace is in order of time"),
        (line([1, 2], -1, 6), r"Expected `int` >= 0 - at `\$.input_length`"),
        (line([1, 2], 200, 6), "hash_ids has 2 numbers for 200 tokens, where blocks of 10 tokens make 20"),
        (line([1, 2, 3], 20, 6), r"hash_ids has 3 numbers for 20 tokens.*--trace-block-tokens"),
        (line([2, 1], 20, 6), "the block 2 comes behind another block here than before"),
        (line([1 << 64, 2], 20, 6), r"Expected `int` <= 9223372036854775807 - at `\$.hash_ids\[0\]`"),
    ],
)
def test_a_damaged_line_is_named_with_what_is_wrong(tmp_path: Path, bad: str, said: str) -> None:
    path = written(tmp_path, GOOD, bad, line([1, 2], 20, 7))
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*{said}"):
        read_trace(path, block_tokens=10)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"timestamp": 1, "input_length": \xff')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: "):
        read_trace(path, block_tokens=10)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(path, block_tokens=10)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read \(No such file or directory\)"):
        read_trace(tmp_path / "none.jsonl", block_tokens=10)


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        read_trace(HEAD, block_tokens=0)
