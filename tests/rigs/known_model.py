"""What a model without weights computes: the tokens it samples, and KV that depends on the whole prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tests.rigs.scheduler_rig import BLOCK, LAYERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

LANES = 4
"""`int64` of a token's KV in one layer: all but the last hold a number made from its prefix, the last one the epoch in
which it was computed."""


def sampled(position: int) -> int:
    """The token that the model samples at a position, whatever comes before it."""
    return 100 + position * 7919 % 900


class Life:
    """A request from its arrival to its end, with all tokens it will ever have.

    A name may be used again once a life has ended, as clients do.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.aborted = False
        self._prompt = list(request.prompt_token_ids or ())
        self._chain: list[int] = []

    def token(self, position: int) -> int:
        """The right token at a position, of prompt or answer."""
        return self._prompt[position] if position < len(self._prompt) else sampled(position)

    def numbers(self, stop: int, drafts: Sequence[int]) -> list[int]:
        """A number for each position below `stop` and for `drafts` behind it, made from all tokens up to it."""
        chain = self._chain
        for position in range(len(chain), stop):
            chain.append(_next(chain[-1] if chain else 0, self.token(position)))
        numbers = chain[:stop]
        for token in drafts:
            numbers.append(_next(numbers[-1], token))
        return numbers


def _next(number: int, token: int) -> int:
    return (number * 1_000_003 + token + 17) % (1 << 40)


@dataclass(slots=True)
class Span:
    """What one request computes in one step: KV of its tokens `start .. stop - 1`, reading all below `stop`."""

    life: Life
    preemptions: int
    """Of the request when it was scheduled: more of them later mean that its output is stale."""
    start: int
    stop: int
    blocks: tuple[torch.Tensor, ...]
    """For each KV cache group the block of each position below `stop`; nobody's where a window has passed it."""
    numbers: torch.Tensor
    output: list[int] = field(default_factory=list)
    """Tokens sampled: drafts that were right, and one more."""
    rejected: int = 0
    """Drafts that were wrong."""

    @classmethod
    def of(
        cls,
        life: Life,
        block_ids: Sequence[Sequence[int]],
        *,
        start: int,
        scheduled: int,
        drafts: Sequence[int],
        samples: bool,
    ) -> Span:
        """
        Args:
            life: whose step it is.
            block_ids: of the request, for each KV cache group.
            start: first position computed.
            scheduled: positions computed, drafts included.
            drafts: tokens that are guessed, last among them.
            samples: whether the step reaches the request's last known token.
        """
        stop = start + scheduled
        known = stop - len(drafts)
        right = 0
        while right < len(drafts) and drafts[right] == life.token(known + right):
            right += 1
        return cls(
            life,
            life.request.num_preemptions,
            start,
            stop,
            tuple(torch.tensor(table)[torch.arange(stop) // BLOCK] for table in block_ids),
            torch.tensor(life.numbers(known, drafts), dtype=torch.int64),
            output=[life.token(position) for position in range(known, known + right + 1)] if samples else [],
            rejected=len(drafts) - right,
        )

    @property
    def stale(self) -> bool:
        """Whether the request lost its blocks after the step was scheduled."""
        return bool(self.life.request.num_preemptions != self.preemptions)

    def kv(self, layer: int) -> torch.Tensor:
        """The right KV of all positions below `stop`, without the epoch: `int64[stop, LANES - 1]`."""
        return kv_of(self.numbers, layer)


def kv_of(numbers: torch.Tensor, layer: int) -> torch.Tensor:
    """The right KV of tokens with these numbers, without the epoch: `int64[len(numbers), LANES - 1]`."""
    return (numbers * LAYERS + layer)[:, None].expand(-1, LANES - 1)
