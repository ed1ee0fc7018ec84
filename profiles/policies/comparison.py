from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from layerstream.insertion import POLICIES
from layerstream.prefill_cost import prefill_cost
from layerstream.replay import BestPool, BlockPool, IndexPool, Pool, next_uses, replay
from layerstream.request_trace import RequestTrace, read_trace
from profiles.policies.arc import ARC
from profiles.policies.greedy_dual import GreedyDual
from profiles.policies.s3_fifo import S3FIFO
from profiles.policies.workload import BLOCK_TOKENS

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B, whose prefill is counted."""
COST = prefill_cost(MODEL)


def block_cost(depth: int) -> float:
    """What the block behind `depth` others costs, in units of the first."""
    before, behind = COST.flops([depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS])
    return float((behind - before) / COST.flops(BLOCK_TOKENS))


POOLS: dict[str, Callable[[int], Pool]] = {
    "LRU": lambda slots: BlockPool(slots, POLICIES["lru"]()),
    "adaptive": lambda slots: BlockPool(slots, POLICIES["adaptive"]()),
    "ARC": lambda slots: IndexPool(slots, 1, ARC()),
    "S3-FIFO": lambda slots: IndexPool(slots, 1, S3FIFO()),
    "greedy dual": lambda slots: IndexPool(slots, 1, GreedyDual(cache(block_cost))),
}
BEST = "optimum"
NAMES = (*POOLS, BEST)


def measure(path: str, name: str, slots: int) -> dict[str, Any]:
    """Serve a trace from one pool."""
    trace = _trace(path)
    pool = BestPool(slots, next_uses(trace)) if name == BEST else POOLS[name](slots)
    begun = time.perf_counter()
    hits = replay(trace, pool)
    return {
        "policy": name,
        "blocks": slots,
        "hit": int(hits.sum()) * BLOCK_TOKENS / int(trace.input_tokens.sum()),
        "saved": float(COST.flops(hits * BLOCK_TOKENS).sum() / COST.flops(trace.input_tokens).sum()),
        "seconds": round(time.perf_counter() - begun, 2),
    }


@cache
def _trace(path: str) -> RequestTrace:
    return read_trace(Path(path), block_tokens=BLOCK_TOKENS)


def compare(path: Path, *, sizes: Sequence[int], jobs: int) -> dict[str, Any]:
    """Every policy in every size."""
    trace = _trace(str(path))
    runs = [(name, slots) for slots in sizes for name in NAMES]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(measure, str(path), *run) for run in runs]
        rows = []
        for future in futures:
            rows.append(future.result())
            print(json.dumps(rows[-1]), flush=True)
    return {
        "requests": len(trace),
        "tokens": int(trace.input_tokens.sum()),
        "blocks": len(trace.blocks),
        "different blocks": trace.distinct,
        "rows": rows,
    }
