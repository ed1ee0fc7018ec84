"""The GPU smoke test's staged half, on fake CUDA streams: it passes on right transfers and fails on wrong ones."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from layerstream.kernels.reference import gather_pages, scatter_pages
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda

SCRIPT = Path(__file__).parents[2] / "profiles" / "gpu_smoke.py"


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_smoke", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while the script is read.

    sys.modules["gpu_smoke"] = module
    spec.loader.exec_module(module)
    return module


def round_trip(smoke: ModuleType, scatter: Callable[..., None], seed: int = 0) -> dict[str, Any]:
    with FakeCuda() as api:
        results = smoke.staged_round_trip(
            CudaDevice(0, api=api),
            None,
            api.kernel(gather_pages),
            api.kernel(scatter),
            place="cpu",
            finish=lambda: api.run(random.Random(seed).choice),
        )
        return {result.what: result.passed for result in results}


@pytest.mark.parametrize("seed", range(3))
def test_right_transfers_pass(smoke: ModuleType, seed: int) -> None:
    verdicts = round_trip(smoke, scatter_pages, seed)
    assert verdicts["staged round trip is exact"] is True
    assert verdicts["other blocks are untouched"] is True


def test_wrong_transfers_fail(smoke: ModuleType) -> None:
    def shifted(dst: torch.Tensor, src: torch.Tensor, layer: Any, blocks: torch.Tensor) -> None:
        scatter_pages(dst, src, layer, blocks + 1)

    verdicts = round_trip(smoke, shifted)
    assert verdicts["staged round trip is exact"] is False
    assert verdicts["other blocks are untouched"] is False


def test_engine_steps_pass_where_there_is_an_engine(smoke: ModuleType) -> None:
    verdicts = {result.what: result.passed for result in smoke.engine_round_trip("cpu", lambda: None)}
    assert len(verdicts) == 4
    assert set(verdicts.values()) == {True}


def test_without_a_gpu_it_says_so(smoke: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: `make gpu-smoke` is the test")
    assert smoke.main() == 3
    assert "no CUDA device" in capsys.readouterr().out
