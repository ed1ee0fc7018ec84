"""Requests of `mini_engine.py`, and one step's tokens of several of them as the arrays that `mini_llama.py` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PER_TOKEN = ("tokens", "positions", "slots", "sequences")
"""Inputs whose first dimension counts tokens. Padded with zeros: a token at slot 0, in the block that nobody owns."""


@dataclass(slots=True)
class Request:
    """One sequence: its tokens, its blocks, and how much of it has KV."""

    tokens: list[int]
    blocks: list[int]
    pool_page: int
    """First of its pages in the host pool."""
    computed: int = 0
    saved_blocks: int = 0
    next_token: int = 0
    """What the model says comes after all of them."""


def table_width(batch: Sequence[tuple[Request, int]], block_tokens: int) -> int:
    """Blocks in the longest table, as a power of two: few widths, so that few shapes are captured."""
    needed = max(-(-(request.computed + count) // block_tokens) for request, count in batch)
    return int(1 << (needed - 1).bit_length())


def batch_inputs(
    batch: Sequence[tuple[Request, int]], block_tokens: int
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any]]:
    """The next tokens of some requests.

    Returns:
        The model's inputs (`MiniLlama.forward`), and the index of each request's last token.
    """
    tables = np.zeros((len(batch), table_width(batch, block_tokens)), np.int64)
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for number, (request, count) in enumerate(batch):
        first, end = request.computed, request.computed + count
        blocks = np.array(request.blocks[: -(-end // block_tokens)], np.int64)
        tables[number, : len(blocks)] = blocks
        positions = np.arange(first, end)
        slots = blocks[positions // block_tokens] * block_tokens + positions % block_tokens
        columns.append((np.array(request.tokens[first:end]), positions, slots, np.full(count, number)))
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    last = np.cumsum([count for _, count in batch]) - 1
    return {**dict(zip(PER_TOKEN, joined, strict=True)), "tables": tables}, last
