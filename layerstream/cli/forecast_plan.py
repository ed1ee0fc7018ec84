"""The part of `layerstream plan` on one hit on a GPU: how much sooner it is, in which mode, and what limits it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from layerstream.cli.plan import size
from layerstream.decisions import LoadMode
from layerstream.errors import ConfigError
from layerstream.forecast import Forecast
from layerstream.hardware import PREFILL_UTILISATION, gpu, tier_bytes_per_s
from layerstream.model_store import cache_dir
from layerstream.prefill_cost import prefill_cost
from layerstream.rate_table import measured_roof

if TYPE_CHECKING:
    from layerstream.capacity import Capacity

HOST = "host"
_TOKENS = re.compile(r"(\d+)([km]?)", re.IGNORECASE)


def parse_tokens(text: str) -> int:
    """A number of tokens, with k for 1,024 and m for 1,048,576 of them.

    Raises:
        ConfigError: it is not one, or 0.
    """
    found = _TOKENS.fullmatch(text.strip())
    count = 0 if found is None else int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2].lower()]
    if count < 1:
        raise ConfigError(f"--prompt {text}: a number of tokens is needed, such as 4000 or 32k")
    return count


def print_forecast(
    config: Mapping[str, Any], capacity: Capacity, *, gpu_name: str, prompt: int, hit: float, tier: str
) -> None:
    """Print what a hit is worth.

    Args:
        config: the model's `config.json`.
        capacity: of the model.
        gpu_name: a name of `layerstream.hardware.GPUS`.
        prompt: its tokens.
        hit: part of the prompt that is kept, from 0 to 1.
        tier: where: "host", or see `layerstream.hardware.tier_bytes_per_s`.

    Raises:
        ConfigError: an argument is not known or not possible, or the cost of the model's prefill cannot be told.
    """
    if not 0 <= hit <= 1:
        raise ConfigError(f"--hit {hit:g}: the part of the prompt that is kept; from 0 to 1")
    if capacity.pp > 1:
        raise ConfigError("--gpu is for one pipeline stage; leave out --pp")
    kind = gpu(gpu_name)
    # The block of the last token is always computed: its logits are what is asked for.
    whole = capacity.block_tokens
    tokens = min(int(hit * prompt), prompt - 1) // whole * whole
    if not tokens:
        raise ConfigError(f"a hit of {hit:g} of {prompt:,} tokens is not a whole block of {whole}; nothing is loaded")
    roof = measured_roof(cache_dir(), gpu_name, "load")
    link = kind.host_bytes_per_s if roof is None else roof
    link_told = f"{kind.link} at {_gigabytes(link)} (" + ("assumed)" if roof is None else "calibrated here)")
    flops = kind.flops * PREFILL_UTILISATION * capacity.tp
    computing = f"{kind.flops / 1e12:,.0f} TFLOP/s a GPU, {PREFILL_UTILISATION:.0%} of it reached (assumed)"
    cost = prefill_cost(config)
    whole_s, hit_s = float(cost.flops(prompt)) / flops, float(cost.flops(tokens)) / flops
    nbytes = capacity.stored_bytes(tokens)
    tier_rate = None if tier == HOST else tier_bytes_per_s(tier)
    forecast = Forecast(
        layers=capacity.layers,
        load_s=nbytes / link,
        compute_s=whole_s - hit_s,
        recompute_s=hit_s,
        tier_s=0.0 if tier_rate is None else nbytes * _writers(capacity) / tier_rate,
    )
    table = Table(
        title=f"A hit of {tokens:,} of {prompt:,} tokens on {gpu_name.upper()}"
        + (f", tp {capacity.tp}" if capacity.tp > 1 else ""),
        title_justify="left",
        show_header=False,
    )
    for _ in range(3):
        table.add_column("")
    table.add_row("to load, each GPU", size(nbytes), "whole blocks")
    if tier_rate is not None:
        told = f"{tier} at {_gigabytes(tier_rate)} (assumed), shared by all GPUs"
        table.add_row(f"{tier} to host memory", f"at least {_time(forecast.tier_s)}", told)
    table.add_row("host memory to GPU", _time(forecast.load_s), link_told)
    table.add_row("compute the hit instead", _time(forecast.recompute_s), computing)
    table.add_row("compute the rest", _time(forecast.compute_s), "as above")
    table.add_section()
    table.add_row("first token, all computed", _time(forecast.cold_s), "")
    table.add_row("first token, loaded first", _time(forecast.whole_s), "")
    table.add_row("first token, layer by layer", _time(forecast.layerwise_s), "")
    table.add_section()
    table.add_row("worth loading", *_worth(forecast))
    table.add_row("alone in the engine", _mode(forecast, running=0), "")
    table.add_row("beside other requests", _mode(forecast, running=1), "the length of their steps not counted")
    limit = {"tier": tier, "link": kind.link, "compute": "computing the rest"}[forecast.bottleneck]
    table.add_row("what takes longest", limit, "")
    kept = capacity.stored_bytes(prompt)
    table.add_row("host memory for the prompt", size(kept * capacity.tp), f"{size(kept)} for each GPU")
    Console().print(table)


def _writers(capacity: Capacity) -> int:
    """Ranks whose bytes come from the tier: ranks with the same KV keep one copy."""
    return 1 if capacity.attention == "MLA" else capacity.tp


def _worth(forecast: Forecast) -> tuple[str, str]:
    if forecast.saved_s <= 0:
        return "no", f"computing is {_time(-forecast.saved_s)} sooner"
    overlap = forecast.whole_s - forecast.layerwise_s
    return "yes", f"saves {_time(forecast.saved_s)}, of which layer by layer {_time(overlap)}"


def _mode(forecast: Forecast, *, running: int) -> str:
    mode, layer = forecast.mode(running=running)
    if mode is LoadMode.LAYERWISE:
        return "layer by layer"
    return "parked until all is there" if layer is None else f"parked until layer {layer + 1} of {forecast.layers}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms"
