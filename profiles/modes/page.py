"""The grid as a table, a summary and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerstream.decisions import LoadMode
from layerstream.picture import LOAD, WAIT
from profiles.modes.grid import Row, row
from profiles.modes.simulation import Case, mixed_layer_s

BEGIN, END = "<!-- written by python -m profiles.modes -->", "<!-- to here -->"
SHOWN = (
    Case(load_layer_s=0.4e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=0),
    Case(load_layer_s=3e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=0),
    Case(load_layer_s=0.4e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=16),
    Case(load_layer_s=1.2e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=16),
    Case(load_layer_s=3e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=16),
    Case(load_layer_s=3e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=16, lag_steps=2),
    Case(load_layer_s=3e-3, compute_layer_s=2e-3, layers=80, step_s=30e-3, running=16),
    Case(load_layer_s=3e-3, compute_layer_s=2e-3, layers=80, step_s=30e-3, running=16, lag_steps=2),
    Case(load_layer_s=20e-3, compute_layer_s=0.3e-3, layers=61, step_s=30e-3, running=1),
)
HEADS = (
    "others",
    "load of a layer",
    "compute of a layer",
    "layers",
    "step of the others",
    "steps to a release",
    "auto is",
    "first token: layerwise",
    "parked",
    "auto",
    "longest gap of the others: layerwise",
    "parked",
    "auto",
)
_INK, _FAINT = "#1f2933", "#d5dbe1"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _choice(its: Row) -> str:
    if its.mode is LoadMode.LAYERWISE:
        return "layerwise"
    return "parked" if its.release is None else f"parked, released after {its.release + 1} of {its.case.layers}"


def table(cases: Sequence[Case] = SHOWN) -> str:
    """Some cases as a Markdown table, times in milliseconds."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for case in cases:
        its = row(case)
        modes = (its.layerwise, its.parked, its.auto)
        gaps = [_ms(times.longest_gap) if case.running else "-" for times in modes]
        cells = [
            str(case.running),
            _ms(case.load_layer_s),
            _ms(mixed_layer_s(case)),
            str(case.layers),
            _ms(case.step_s) if case.running else "-",
            str(case.lag_steps) if case.running else "-",
            _choice(its),
            *(_ms(times.first_token) for times in modes),
            *gaps,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def put_into(page: str, text: str) -> str:
    """The page with `text` between its two marks.

    Raises:
        ValueError: the marks are not there once each, in this order.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError(f"the page must hold {BEGIN!r} and behind it {END!r}, once each; put them where the table is")
    return f"{head}{BEGIN}\n{text}{END}{tail}"


def draw(path: Path) -> None:
    """First token, and longest gap of the others, over the load of a layer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), dpi=160, layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    base = Case(load_layer_s=1e-3, compute_layer_s=1e-3, layers=32, step_s=12e-3, running=16)
    loads = [0.02e-3 * step for step in range(1, 201)]
    rows = [row(replace(base, load_layer_s=load)) for load in loads]
    lines = (("layerwise", WAIT, "-"), ("parked", LOAD, "-"), ("auto", _INK, ":"))
    for axes, what, title in zip(
        panels, ("first_token", "longest_gap"), ("First token of the request", "Longest gap of the others"), strict=True
    ):
        for name, color, style in lines:
            values = [1e3 * getattr(getattr(its, name), what) for its in rows]
            axes.plot([1e3 * load for load in loads], values, color=color, linestyle=style, linewidth=2.2, label=name)
        _dress(axes, title)
    panels[0].legend(frameon=False, labelcolor=_INK)
    figure.suptitle(
        "32 layers, 1 ms of compute each, beside requests whose steps take 12 ms",
        color=_INK,
        fontsize=10,
        x=0.02,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": ""})


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel("load of a layer (ms)", color=_INK)
    axes.set_ylabel("ms", color=_INK)
    axes.set_ylim(bottom=0)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
