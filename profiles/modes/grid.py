"""The rule against every mode there is, over a grid of loads and engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from layerstream.decisions import LoadMode
from layerstream.modes import choose_mode
from profiles.modes.simulation import Case, Times, mixed_layer_s, simulate

LOADS_S = (0.02e-3, 0.1e-3, 0.4e-3, 1e-3, 3e-3, 8e-3, 20e-3)
COMPUTES_S = (0.05e-3, 0.3e-3, 1e-3, 4e-3, 12e-3)
LAYERS = (16, 32, 61, 80)
STEPS_S = (5e-3, 12e-3, 30e-3, 80e-3)
RUNNING = (0, 1, 16)
LAGS = (1, 2)
CLOSE = 1.02
"""What the rule may lose against the best mode."""
ERRORS = (0.9, 1.0, 1.1)
"""By which rates may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What each mode made of a case."""

    case: Case
    mode: LoadMode
    release: int | None
    """The rule's choice."""
    auto: Times
    layerwise: Times
    parked: Times
    """To the end of the load."""
    best: Times
    """The soonest first token of all modes that hold up nobody more than `parked` does, or of all where no other runs;
    a layerwise load that loads no slower than it computes counts among them."""

    @property
    def loss(self) -> float:
        """First token of the rule over that of the best."""
        return self.auto.first_token / self.best.first_token

    @property
    def extra_gap(self) -> float:
        """Longest gap of the others over that of a load parked to its end; 1 without others."""
        return self.auto.longest_gap / self.parked.longest_gap if self.case.running else 1.0


def cases() -> Iterator[Case]:
    """The grid."""
    every = itertools.product(LOADS_S, COMPUTES_S, LAYERS, STEPS_S, RUNNING, LAGS)
    for load, compute, layers, step, running, lag in every:
        if running or (step, lag) == (STEPS_S[0], LAGS[0]):
            yield Case(
                load_layer_s=load,
                compute_layer_s=compute,
                layers=layers,
                step_s=step,
                running=running,
                lag_steps=lag,
            )


def chosen(case: Case) -> tuple[LoadMode, int | None]:
    """What the rule says."""
    return choose_mode(
        load_layer_s=case.load_layer_s,
        compute_layer_s=case.compute_layer_s,
        layers=case.layers,
        step_s=case.step_s if case.running else None,
        running=case.running,
        lag_steps=case.lag_steps,
    )


def row(case: Case) -> Row:
    """Try every mode on a case."""
    mode, release = chosen(case)
    layerwise, parked = simulate(case, LoadMode.LAYERWISE), simulate(case, LoadMode.PARKED)
    released = [simulate(case, LoadMode.PARKED, layer) for layer in range(case.layers - 1)]
    quiet = [times for times in released if times.longest_gap <= parked.longest_gap * (1 + 1e-9)]
    if not case.running or case.load_layer_s <= mixed_layer_s(case):
        quiet.append(layerwise)
    return Row(
        case=case,
        mode=mode,
        release=release,
        auto=simulate(case, mode, release),
        layerwise=layerwise,
        parked=parked,
        best=min([parked, *quiet], key=lambda times: times.first_token),
    )


def misjudged(case: Case) -> list[Times]:
    """What becomes of the choices that rates off by `ERRORS` lead to."""
    return [
        simulate(
            case,
            *chosen(
                replace(
                    case,
                    load_layer_s=case.load_layer_s * load,
                    compute_layer_s=case.compute_layer_s * compute,
                    step_s=case.step_s * step,
                )
            ),
        )
        for load, compute, step in itertools.product(ERRORS, repeat=3)
    ]
