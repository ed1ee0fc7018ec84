"""The part of `layerstream plan` that serves a trace from pools of several sizes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from layerstream.capacity import Capacity
from layerstream.cli.plan import size
from layerstream.config import StreamConfig
from layerstream.errors import ConfigError
from layerstream.insertion import POLICIES
from layerstream.picture import draw_pools
from layerstream.prefill_cost import PrefillCost
from layerstream.replay import BestPool, BlockPool, IndexPool, Pool, next_uses, replay
from layerstream.request_trace import RequestTrace, read_trace

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes of the pools, as parts of the one that is asked about."""
BEST = "optimum"
POLICY_NAMES = (*sorted(POLICIES), BEST)
_PARALLEL_BLOCKS = 1_000_000
"""Blocks from which on processes of their own are worth starting."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pool did for a trace."""

    policy: str
    slots: int
    hit_rate: float
    """Part of the prompts' tokens that was hit."""
    saved: float
    """Part of the prefill's operations that need not be done."""


def print_trace(
    path: Path, capacity: Capacity, cost: PrefillCost, *, pool_bytes: int, block_tokens: int, out: Path
) -> None:
    """Serve a trace from pools around a size, print a table and draw a picture.

    Args:
        path: the trace.
        capacity: of the model.
        cost: of the model's prefill.
        pool_bytes: host memory of one rank.
        block_tokens: tokens in one block of the trace.
        out: folder for the picture.

    Raises:
        ConfigError: the trace is not understood, the pool holds less than a chunk, or the picture cannot be drawn.
    """
    chunk_blocks = StreamConfig().chunk_blocks(block_tokens)
    slot_bytes = chunk_blocks * block_tokens * capacity.token_bytes
    if pool_bytes < slot_bytes:
        raise ConfigError(
            f"a pool of {size(pool_bytes)} does not hold {chunk_blocks * block_tokens:,} tokens, the least that a "
            f"trace with blocks of {block_tokens} tokens is served in; use --pool-gib {slot_bytes / (1 << 30):.3g} "
            "or more"
        )
    console = Console()
    sizes = sorted({max(1, int(pool_bytes * factor) // slot_bytes) for factor in FACTORS})
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            total: int | None = path.stat().st_size
        except OSError:
            total = None
        reading = progress.add_task(f"reading {path.name}, bytes", total=total)
        trace = read_trace(path, block_tokens=block_tokens, progress=partial(progress.advance, reading))
        serving = progress.add_task("serving requests", total=len(trace) * len(sizes) * len(POLICY_NAMES))
        outcomes = outcomes_of(
            trace, cost, sizes=sizes, chunk_blocks=chunk_blocks, progress=partial(progress.advance, serving)
        )
    console.print(_table(path, trace, outcomes, slot_bytes=slot_bytes, chunk_tokens=chunk_blocks * block_tokens))
    console.print(
        "hit: part of the prompts' tokens that come from the pool; saved: part of the prefill's operations, where deep "
        "blocks count for more. No policy hits more than the optimum, which knows the future; saved is what that saves."
    )
    out.mkdir(parents=True, exist_ok=True)
    picture = draw_pools(
        {
            name: [(o.slots * slot_bytes, o.hit_rate, o.saved) for o in outcomes if o.policy == name]
            for name in POLICY_NAMES
        },
        out / f"{path.stem}-pools.png",
        title=f"{len(trace):,} requests of {path.name}",
    )
    console.print(f"drawn: {picture}")


def outcomes_of(
    trace: RequestTrace,
    cost: PrefillCost,
    *,
    sizes: Sequence[int],
    chunk_blocks: int,
    progress: Callable[[int], None],
    processes: int | None = None,
) -> list[Outcome]:
    """Serve a trace from a pool of each size under each policy, largest pools last.

    Args:
        trace: the requests.
        cost: of the model's prefill.
        sizes: chunks that the pools hold.
        chunk_blocks: most blocks in one chunk.
        progress: told of requests that were served by one of the pools.
        processes: how many to use; None: as many as there are cores where the trace is long, or else this one alone.
    """
    soon = next_uses(trace)
    runs = [(name, slots) for slots in sizes for name in POLICY_NAMES]
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if len(trace.blocks) >= _PARALLEL_BLOCKS else 1
    if processes == 1:
        served = [_serve(trace, soon, name, slots, chunk_blocks, progress) for name, slots in runs]
    else:
        served = _serve_apart(trace, soon, runs, chunk_blocks, progress, min(processes, len(runs)))
    whole, tokens = float(cost.flops(trace.input_tokens).sum()), int(trace.input_tokens.sum())
    return [
        Outcome(
            policy=name,
            slots=slots,
            hit_rate=int(hits.sum()) * trace.block_tokens / max(tokens, 1),
            saved=float(cost.flops(hits * trace.block_tokens).sum()) / max(whole, 1.0),
        )
        for (name, slots), hits in zip(runs, served, strict=True)
    ]


def _serve(
    trace: RequestTrace,
    soon: npt.NDArray[np.int32],
    name: str,
    slots: int,
    chunk_blocks: int,
    progress: Callable[[int], None],
) -> npt.NDArray[np.int64]:
    pool: Pool
    if name == BEST:
        # Chunks that may end anywhere hold no more than as many whole ones.
        pool = BestPool(slots * chunk_blocks, soon)
    elif chunk_blocks == 1:
        pool = BlockPool(slots, POLICIES[name]())
    else:
        pool = IndexPool(slots, chunk_blocks, POLICIES[name]())
    return replay(trace, pool, progress)


def _serve_apart(
    trace: RequestTrace,
    soon: npt.NDArray[np.int32],
    runs: Sequence[tuple[str, int]],
    chunk_blocks: int,
    progress: Callable[[int], None],
    processes: int,
) -> list[npt.NDArray[np.int64]]:
    """Each run in some process; they share the trace through files, which stay in memory once."""
    # Spawned, since a process with threads, such as that of a progress bar, is not safely forked.
    context = get_context("spawn")
    served = context.Value("q", 0)
    with tempfile.TemporaryDirectory(prefix="layerstream-trace-") as folder:
        for name, values in {**_arrays(trace), "soon": soon}.items():
            np.save(Path(folder) / f"{name}.npy", values)
        with ProcessPoolExecutor(
            processes,
            mp_context=context,
            initializer=_begin,
            initargs=(folder, trace.block_tokens, trace.distinct, served),
        ) as pool:
            futures: list[Future[npt.NDArray[np.int64]]] = [pool.submit(_run, *run, chunk_blocks) for run in runs]
            said, waiting = 0, set(futures)
            while waiting:
                waiting = wait(waiting, timeout=0.2).not_done
                progress(served.value - said)
                said = served.value
            return [future.result() for future in futures]


def _arrays(trace: RequestTrace) -> dict[str, npt.NDArray[Any]]:
    values = {item.name: getattr(trace, item.name) for item in fields(trace)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


_shared: tuple[RequestTrace, npt.NDArray[np.int32], Any] | None = None
"""In a process that serves: the trace, when its blocks are asked for next, and the count of requests served."""


def _begin(folder: str, block_tokens: int, distinct: int, served: Any) -> None:
    global _shared  # noqa: PLW0603 - the only way to what an initializer was given
    load = {file.stem: np.load(file, mmap_mode="r") for file in Path(folder).glob("*.npy")}
    soon = load.pop("soon")
    _shared = RequestTrace(block_tokens=block_tokens, distinct=distinct, **load), soon, served


def _run(name: str, slots: int, chunk_blocks: int) -> npt.NDArray[np.int64]:
    assert _shared is not None
    trace, soon, served = _shared

    def count(requests: int) -> None:
        with served.get_lock():
            served.value += requests

    return _serve(trace, soon, name, slots, chunk_blocks, count)


def _table(
    path: Path, trace: RequestTrace, outcomes: Sequence[Outcome], *, slot_bytes: int, chunk_tokens: int
) -> Table:
    tokens = trace.input_tokens
    table = Table(
        title=f"{path.name}: {len(trace):,} requests, {float(tokens.mean()):,.0f} tokens a prompt, "
        f"{trace.distinct:,} different blocks of {trace.block_tokens} tokens",
        title_justify="left",
    )
    for heading in ("pool of one rank", "tokens"):
        table.add_column(heading, justify="right")
    for name in POLICY_NAMES:
        table.add_column(f"{name}: hit", justify="right")
        table.add_column("saved", justify="right")
    for slots in sorted({outcome.slots for outcome in outcomes}):
        row = {outcome.policy: outcome for outcome in outcomes if outcome.slots == slots}
        cells = [text for name in POLICY_NAMES for text in (f"{row[name].hit_rate:.1%}", f"{row[name].saved:.1%}")]
        table.add_row(size(slots * slot_bytes), f"{slots * chunk_tokens:,}", *cells)
    return table
