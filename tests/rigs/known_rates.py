"""Rates as an engine would have learned them on a machine whose costs are known."""

from __future__ import annotations

from layerstream.measured import Measured, attended
from layerstream.rates import Rates

BYTES = [1 << shift for shift in range(16, 33)]
TOKENS = [16, 64, 256, 1024, 4096, 8192]
CONTEXTS = [0, 1000, 10_000, 50_000]


def known_rates(
    *,
    load_fixed_s: float = 100e-6,
    load_unit_s: float = 1 / 50e9,
    step_fixed_s: float = 8e-3,
    token_s: float = 50e-6,
    pair_s: float = 1e-9,
    stages: int = 1,
) -> Rates:
    """By default about an 8B model on a GPU behind PCIe 5: 50 GB/s, 20,000 tokens of prefill in a second.

    Args:
        load_fixed_s: of a load.
        load_unit_s: of its byte.
        step_fixed_s: of a forward.
        token_s: of its token.
        pair_s: of a (token, token it sees).
        stages: pipeline stages.
    """
    rates = Rates(stages=stages)
    for _ in range(2):
        rates.learn(
            Measured(
                steps=[
                    (n, attended(n, c), step_fixed_s + token_s * n + pair_s * attended(n, c))
                    for n in TOKENS
                    for c in CONTEXTS
                ]
            )
        )
        rates.learn(Measured(loads=[("staged", n, load_fixed_s + load_unit_s * n) for n in BYTES]))
    return rates
