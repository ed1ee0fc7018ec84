"""Load or recompute, all or a part, layerwise or parked: decided by what this machine was seen to take.

What is loaded by default is not to be lost to a bad estimate: computing instead must be sooner even if loads are a
standard error faster, and forwards slower, than they seem. Near the point where both cost the same, what was decided
last for about as large a hit stands until the other is better by a margin (`Leaning`), so that decisions do not follow
every sample. A rate that is not used is not learned either: where loading has lost for a while, one request is made to
load all the same (`Rates.stale`), so that a link which has become fast is found again.
"""

from __future__ import annotations

import logging

from layerstream.decisions import Decision, LoadCase, LoadMode
from layerstream.leaning import MARGIN, Leaning
from layerstream.modes import choose_mode
from layerstream.rates import LOAD, Rates
from layerstream.split import Costs, best_split

logger = logging.getLogger(__name__)


class RateChooser:
    """See this module, and `layerstream.decisions.Chooser`.

    Args:
        rates: what is known.
        recompute: whether less than all may be loaded.
        lag_steps: steps until a release takes effect: see `choose_mode`.
    """

    def __init__(self, rates: Rates, *, recompute: bool = True, lag_steps: int = 1) -> None:
        self._rates = rates
        self._lag_steps = lag_steps
        self._recompute = recompute
        self._leaning = Leaning()

    def choose(self, case: LoadCase) -> Decision:
        """Decide. Asked again, the answer is the same until rates change or a hit of about that size is decided
        otherwise."""
        likely, hopeful = self._costs(case, 0.0), self._costs(case, 1.0)
        if likely is None or hopeful is None or case.found_tokens < case.block_tokens:
            return Decision(
                tokens=case.found_tokens,
                mode=LoadMode.LAYERWISE,
                release_after_layer=None,
                reason="unknown_rates",
                load_s=None,
                recompute_s=None,
                stall_s=None,
            )
        if not self._recompute:
            return self._decision(likely, likely.blocks, "load")
        blocks = self._clear(hopeful)
        gain, saved = hopeful.gain_s(blocks), hopeful.recompute_s(blocks)
        if self._leaning.take(case.found_tokens, gain, saved):
            return self._decision(likely, blocks, "load" if blocks == likely.blocks else "load_part")
        # A trial of less would tell nothing of loads as large as those that lost.
        if not case.queued_bytes and self._rates.stale(LOAD, -gain / max(saved, 1e-9)):
            return self._decision(likely, blocks, "trial")
        return self._decision(likely, 0, "recompute")

    def _costs(self, case: LoadCase, errors: float) -> Costs | None:
        """What a case costs if loads are so many standard errors faster, and forwards slower, than estimated."""
        rates = self._rates
        load, forward = rates.line(LOAD, errors=-errors), rates.forward(case.found_tokens, errors=errors)
        if load is None or forward is None:
            return None
        return Costs(case=case, load=load, forward=forward, step_tokens=rates.step_tokens, stages=rates.stages)

    @staticmethod
    def _clear(costs: Costs) -> int:
        """The best split if it is clearly better than all of the hit and than nothing of it; otherwise all. A part is
        a load and computing besides, which takes the device from others."""
        best, whole = best_split(costs), costs.blocks
        margin = MARGIN * costs.recompute_s(whole)
        gain = costs.gain_s(best)
        return best if gain > margin and gain > costs.gain_s(whole) + margin else whole

    def _decision(self, costs: Costs, blocks: int, reason: str) -> Decision:
        case = costs.case
        mode, release = LoadMode.LAYERWISE, None
        if blocks:
            mode, release = choose_mode(
                load_layer_s=costs.block_s * blocks / case.layers,
                compute_layer_s=costs.first_step_s(blocks) / case.layers,
                layers=case.layers,
                step_s=case.step_s,
                running=case.running,
                queued_s=costs.waits_s,
                lag_steps=self._lag_steps,
            )
        # Of what is not loaded, the numbers are those of the whole hit: they say why.
        told = blocks or costs.blocks
        decision = Decision(
            tokens=blocks * case.block_tokens,
            mode=mode,
            release_after_layer=release,
            reason=reason,
            load_s=costs.load_s(told),
            recompute_s=costs.recompute_s(told),
            stall_s=costs.stall_s(told),
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("LayerStream: %s for %s", decision, case)
        return decision
