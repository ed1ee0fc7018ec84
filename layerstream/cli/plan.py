"""`layerstream plan`: capacity arithmetic as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from layerstream.capacity import KV_DTYPES, Capacity, kv_capacity, load_config
from layerstream.config import StreamConfig
from layerstream.errors import ConfigError
from layerstream.prefill_cost import prefill_cost

GIB = 1 << 30


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more; at most two decimals."""
    power = min(4, max(0, (nbytes.bit_length() - 1) // 10))
    number = f"{nbytes / (1 << 10 * power):,.2f}".rstrip("0").rstrip(".")
    return f"{number} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def run(
    *,
    model: Path,
    kv_dtype: str,
    tp: int,
    pp: int,
    tokens: int,
    block_tokens: int,
    pool_gib: float | None,
    tiers: Sequence[str] = (),
    trace: Path | None = None,
    trace_block_tokens: int = 512,
    out: Path = Path("out"),
    gpu: str | None = None,
    prompt: str | None = None,
    hit: float | None = None,
) -> None:
    """Print the table.

    Args:
        model: model folder or `config.json`.
        kv_dtype: as `kv_capacity` takes it.
        tp: tensor parallel ranks.
        pp: pipeline stages.
        tokens: length of one sequence.
        block_tokens: tokens in one block.
        pool_gib: host pool of one rank; None asks this machine, with all ranks on it.
        tiers: entries of the option `tiers` as JSON, each to be tried here; with `gpu` one may be a name instead, of
            where the hit of the forecast is.
        gpu: kind of GPU to forecast a hit on; None for no forecast.
        prompt: tokens of the forecast's prompt; None for `tokens` of them.
        hit: part of that prompt that is kept; None for 0.9.
        trace: requests to serve from pools of this size and others, see `layerstream.request_trace`.
        trace_block_tokens: tokens in one block of the trace.
        out: folder for the trace's picture.

    Raises:
        ConfigError: the config, a tier, the trace or the forecast's request is not understood, or the pool has no room
            for one block.
    """
    config = load_config(model)
    if gpu is None and (prompt is not None or hit is not None):
        raise ConfigError("--prompt and --hit are about a hit on some GPU; add --gpu, such as --gpu h100")
    named = [tier for tier in tiers if gpu is not None and re.fullmatch(r"[\w ./]+", tier)]
    if len(named) > 1:
        raise ConfigError(f"--tier {' and --tier '.join(named)}: a forecast is of one place where the hit is; name one")
    capacity = kv_capacity(config, kv_dtype=kv_dtype, tp=tp, pp=pp, block_tokens=block_tokens)
    if pool_gib is None:
        from layerstream.host_budget import default_budget

        pool_bytes, pool_origin = default_budget(local_ranks=tp * pp), "this machine's default"
    else:
        if not 0 < pool_gib <= 1 << 20:
            raise ConfigError(f"--pool-gib {pool_gib:g}: a pool has more than 0 and at most 1048576 GiB")
        pool_bytes, pool_origin = int(pool_gib * GIB), "as given"
    if pool_bytes < capacity.block_bytes:
        raise ConfigError(
            f"a pool of {size(pool_bytes)} does not hold one block of {size(capacity.block_bytes)}; "
            f"use --pool-gib {capacity.block_bytes / GIB:.3g} or more"
        )
    Console().print(_table(capacity, tokens=tokens, pool_bytes=pool_bytes, pool_origin=pool_origin))
    if gpu is not None:
        from layerstream.cli.forecast_plan import HOST, parse_tokens, print_forecast

        print_forecast(
            config,
            capacity,
            gpu_name=gpu,
            prompt=tokens if prompt is None else parse_tokens(prompt),
            hit=0.9 if hit is None else hit,
            tier=named[0] if named else HOST,
        )
    if tried := [tier for tier in tiers if tier not in named]:
        from layerstream.cli.tier_plan import print_tiers

        print_tiers(tried, capacity, tokens=tokens)
    if trace is not None:
        from layerstream.cli.trace_plan import print_trace

        print_trace(
            trace, capacity, prefill_cost(config), pool_bytes=pool_bytes, block_tokens=trace_block_tokens, out=out
        )
    if _windowed(capacity):
        Console().print(
            "The host pool keeps all layers of every block, also those that windows have passed in the KV cache: a hit "
            "may end at any block."
        )


def _table(capacity: Capacity, *, tokens: int, pool_bytes: int, pool_origin: str) -> Table:
    ranks = capacity.tp * capacity.pp
    table = Table(title="KV cache", title_justify="left", show_header=ranks > 1)
    table.add_column("")
    table.add_column("one rank", justify="right")
    if ranks > 1:
        table.add_column(f"all {ranks} ranks", justify="right")

    def row(what: str, rank: str, everywhere: str = "") -> None:
        table.add_row(what, rank, *([everywhere] if ranks > 1 else []))

    row("attention", capacity.attention + (", sliding windows" if _windowed(capacity) else ""))
    row("KV dtype", f"{capacity.kv_dtype}, {KV_DTYPES[capacity.kv_dtype]} B")
    row("layers", f"{max(len(stage) for stage in capacity.stages)}", f"{capacity.layers}")
    row("per token", size(capacity.token_bytes), size(capacity.total_token_bytes))
    row(f"per block of {capacity.block_tokens} tokens", size(capacity.block_bytes))
    chunk_blocks = StreamConfig().chunk_blocks(capacity.block_tokens)
    row(f"per chunk of {chunk_blocks * capacity.block_tokens} tokens", size(chunk_blocks * capacity.block_bytes))
    row("per page (one layer of a block)", size(capacity.page_bytes))
    row(
        f"per sequence of {tokens:,} tokens",
        size(capacity.sequence_bytes(tokens)),
        size(capacity.total_sequence_bytes(tokens)),
    )
    table.add_section()
    row(f"host pool ({pool_origin})", size(pool_bytes), size(pool_bytes * ranks))
    row("tokens that fit", f"{capacity.tokens_in(pool_bytes):,}")
    row("sequences that fit", f"{capacity.sequences_in(pool_bytes, tokens):,}")
    return table


def _windowed(capacity: Capacity) -> bool:
    return any(window is not None for stage in capacity.stages for window in stage)
