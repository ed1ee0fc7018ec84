"""The part of `layerstream plan` that tries tiers: how much they hold, and how long a sequence takes from each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from layerstream.cli.plan import size
from layerstream.config import StreamConfig
from layerstream.errors import ConfigError, TierError
from layerstream.tiers.objects import ObjectFormat
from layerstream.tiers.registry import parse_tiers
from layerstream.tiers.trial import Trial, try_tier

if TYPE_CHECKING:
    from layerstream.capacity import Capacity
    from layerstream.tiers.registry import TierSpec

TRIED_BYTES = 256 << 20
"""About how much is written to a tier and read back."""


def print_tiers(entries: Sequence[str], capacity: Capacity, *, tokens: int) -> None:
    """Try each tier with objects of the model's size and print a table.

    Args:
        entries: each one entry of the option `tiers`, as JSON.
        capacity: of the model.
        tokens: length of the sequence whose time is told.

    Raises:
        ConfigError: an entry cannot be used.
    """
    specs = parse_tiers([_entry(text) for text in entries])
    chunk_blocks = StreamConfig().chunk_blocks(capacity.block_tokens)
    layers = max(len(stage) for stage in capacity.stages)
    form = ObjectFormat(
        layers=[f"layer.{number}" for number in range(layers)],
        page_bytes=[capacity.page_bytes] * layers,
        chunk_blocks=chunk_blocks,
        block_tokens=capacity.block_tokens,
        rank=0,
    )
    objects = max(2, min(64, TRIED_BYTES // form.nbytes(chunk_blocks)))
    table = Table(
        title=f"Tiers, tried with {objects} objects of {size(form.nbytes(chunk_blocks))}, one rank's",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("capacity", "tokens that fit", "write", "read", f"{tokens:,} tokens from it"):
        table.add_column(heading, justify="right")
    for spec in specs:
        table.add_row(spec.name, *_row(spec, form, capacity, objects=objects, tokens=tokens))
    Console().print(table)


def _row(spec: TierSpec, form: ObjectFormat, capacity: Capacity, *, objects: int, tokens: int) -> list[str]:
    try:
        trial = try_tier(spec.tier, form, objects=objects)
    except (TierError, OSError) as error:
        return ["", "", "", "", f"not usable now: {error}"]
    holds = trial.usage.capacity_bytes if trial.usage is not None else None
    return [
        "not told" if holds is None else size(holds),
        "" if holds is None else f"{_tokens_in(holds, form, capacity):,}",
        f"{trial.write_bytes_per_s / 1e9:.2f} GB/s",
        f"{trial.read_bytes_per_s / 1e9:.2f} GB/s",
        f"{_seconds(trial, form, capacity, tokens):.3g} s",
    ]


def _tokens_in(nbytes: int, form: ObjectFormat, capacity: Capacity) -> int:
    """Tokens in whole objects of all ranks."""
    ranks = capacity.tp * capacity.pp
    return nbytes // (ranks * form.nbytes(form.chunk_blocks)) * form.chunk_blocks * form.block_tokens


def _seconds(trial: Trial, form: ObjectFormat, capacity: Capacity, tokens: int) -> float:
    """One rank's time for a sequence at the rate that was measured; ranks that share a device or link take longer."""
    nbytes = capacity.stored_bytes(tokens) + -(-tokens // (form.chunk_blocks * form.block_tokens)) * form.header_bytes
    return trial.find_seconds + nbytes / trial.read_bytes_per_s


def _entry(text: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'--tier {text}: not JSON ({error}); write it as \'{{"type": "disk", ...}}\', or add --gpu for a forecast'
        ) from error
    if not isinstance(entry, dict):
        raise ConfigError(f'--tier {text}: one tier is an object, as \'{{"type": "disk", ...}}\'')
    return entry
