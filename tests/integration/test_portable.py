"""Portable chunks on real engines: the CPU's plain pages are MLA's alone, and it says so of all others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import tiny_models
from tests.rigs.engine_life import EngineLife, Served

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 1000
CHUNK = 256


def disk(folder: Path, *, portable: bool = True) -> dict[str, Any]:
    # However busy the machine is, a lookup is not late.
    return {"type": "disk", "path": str(folder), "gib": 1, "portable": portable, "lookup_ms": 20_000}


def distance(one: Served, two: Served) -> float:
    """Largest difference between the logprobs of tokens that both name."""
    pairs = list(zip(one.logprobs, two.logprobs, strict=True))
    return max(
        (abs(mine[token] - theirs[token]) for mine, theirs in pairs for token in mine.keys() & theirs.keys()),
        default=float("inf"),
    )


def test_two_ranks_serve_what_one_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny_models.latent(tmp_path / "model"), tmp_path / "kv"
    ids = [random.Random(seed).choices(range(10, 500), k=TOKENS) for seed in (1, 2)]
    setup: dict[str, Any] = {"max_model_len": 2048, "dtype": "float32"}
    options = {"host_gib": 0.25, "chunk_tokens": CHUNK, "verify": True}
    tiers = [disk(folder)]
    with EngineLife(model, tmp_path / "one.log", tiers=tiers, options=options, **setup) as one:
        cold = [one.serve(each) for each in ids]
    assert [each.cached_tokens for each in cold] == [0, 0]
    files = sorted(folder.rglob("*.safetensors"))
    assert {file.name.split(".")[1] for file in files} == {"0"}, "one latent, one object"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with EngineLife(model, tmp_path / "two.log", tiers=tiers, options=options, tensor_parallel_size=2, **setup) as two:
        warm = [two.serve(each) for each in ids]
    for hit, first, other in zip(warm, cold, reversed(cold), strict=True):
        assert hit.cached_tokens >= TOKENS // CHUNK * CHUNK
        assert hit.token_ids == first.token_ids != other.token_ids
        # Ranks add up in another order than one does.
        assert distance(hit, first) < 0.02
    assert sorted(folder.rglob("*.safetensors")) == files, "what is there is not written again"


def test_an_engine_with_packed_pages_ends_with_one_line_that_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    log = tmp_path / "packed.log"
    with (
        pytest.raises(RuntimeError, match="the engine ended"),
        EngineLife(model=tiny_llama, log=log, tiers=[disk(tmp_path / "kv")]),
    ):
        pass
    said = [line for line in log.read_text(errors="replace").splitlines() if "turn the option portable off" in line]
    assert any(
        "ERROR" in line and "kv_connector_extra_config['tiers']: layer " in line and "instruction set" in line
        for line in said
    ), log.read_text(errors="replace")[-3000:]
