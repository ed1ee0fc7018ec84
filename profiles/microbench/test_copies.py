"""How fast the staged path moves a hit on the CPU device, beside one plain copy of as many bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from layerstream.engine import StreamEngine
from layerstream.jobs import JobKind
from profiles.microbench.results import Results, Row
from profiles.microbench.rig import BLOCK_TOKENS, drain, make_engine, run_step

BLOCKS = 256
ROUNDS = 50


@pytest.fixture
def engine() -> Iterator[StreamEngine]:
    engine = make_engine(BLOCKS, host_gib=0.5, transfer_path="staged")
    yield engine
    assert engine.close(10.0)


@pytest.mark.parametrize(("kind", "name"), [(JobKind.LOAD, "load"), (JobKind.SAVE, "save")], ids=["load", "save"])
def test_staged_path(
    benchmark: Any, engine: StreamEngine, results: Results, prompt_tokens: int, kind: JobKind, name: str
) -> None:
    blocks = random.Random(0).sample(range(BLOCKS), (prompt_tokens - 1) // BLOCK_TOKENS)
    nbytes = len(blocks) * engine.geometry.block_bytes

    def move() -> None:
        run_step(engine, kind, blocks)
        drain(engine)

    benchmark.pedantic(move, rounds=ROUNDS, warmup_rounds=3)
    plain = nbytes / _plain_copy_seconds(nbytes)
    results.add(
        Row(
            name=f"{name} through the staged path",
            unit="GB/s",
            scale=1e-9,
            digits=2,
            samples=[nbytes / seconds for seconds in benchmark.stats.stats.data],
            note=f"{nbytes / 1e6:.1f} MB in {len(blocks)} scattered blocks, each byte copied twice (through the ring); "
            f"one np.copyto of as many bytes: {plain / 1e9:.2f} GB/s",
        )
    )


def _plain_copy_seconds(nbytes: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))
