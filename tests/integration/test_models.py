"""Real engines whose models keep KV in different ways: windows, latent vectors, ranks, bytes of one eighth.

Each hit is as long as vLLM's own and gives its logprobs to the last bit; every block moved is compared (`verify`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstream.model_store import tiny_model
from tests.rigs import tiny_models
from tests.rigs.vllm_engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LENGTHS = (129, 700, 1281)
TWO_RANKS = {"tensor_parallel_size": 2}


@contextmanager
def started(model: Path, **arguments: Any) -> Iterator[VllmEngine]:
    options = {"host_gib": 0.25, "verify": True, "sanitize": True, **arguments.pop("options", {})}
    engine = VllmEngine(model, options=options, **{"max_model_len": 2048, "dtype": "float32", **arguments})
    try:
        yield engine
    finally:
        engine.close()


def check_hits(engine: VllmEngine) -> None:
    for length in LENGTHS:
        ids = random.Random(length).choices(range(10, 500), k=length)
        assert engine.serve(ids).cached_tokens == 0
        local = engine.serve(ids, tokens=4, logprobs=5)
        engine.forget()
        warm = engine.serve(ids, tokens=4, logprobs=5)
        assert warm.cached_tokens == local.cached_tokens == (length - 1) // engine.block_tokens * engine.block_tokens
        assert warm.logprobs == local.logprobs


def test_layers_with_windows_among_others(tmp_path: Path) -> None:
    with started(tiny_models.hybrid(tmp_path)) as engine:
        check_hits(engine)
        groups = engine.in_worker(lambda worker: [len(layers) for layers in worker.engine.geometry.groups])
        assert sum(groups) == 6 and len(groups) > 1


@pytest.mark.slow
@pytest.mark.parametrize("load_mode", ["layerwise", "parked"])
@pytest.mark.parametrize("make", [tiny_models.windowed, tiny_models.latent, tiny_models.hybrid])
def test_hits_are_exact(tmp_path: Path, make: Callable[[Path], Path], load_mode: str) -> None:
    with started(make(tmp_path), options={"load_mode": load_mode}) as engine:
        check_hits(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shared"), [(tiny_model, False), (tiny_models.latent, True)])
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], shared: bool) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with started(make(tmp_path), **TWO_RANKS) as engine:
        check_hits(engine)
        assert engine.in_workers(lambda worker: worker.engine.writes) == [True, not shared]


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU build quantizes KV on CPUs with AVX-512 or AMX only"
)
def test_a_quantized_cache(tmp_path: Path) -> None:
    with started(tiny_model(tmp_path), kv_cache_dtype="fp8") as engine:
        check_hits(engine)
