"""How much of every load the model's compute hid: `python -m profiles.overlap RECORDING...`

A recording is an SQLite export of Nsight Systems, a trace of PyTorch's profiler (for both see `profiles/traces.py`), or
a timeline that layerstream wrote itself (option `trace_dir`). Columns are means over the loads a layer was part of;
`profiles/loads.py` defines each of them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerstream.errors import ConfigError, LayerStreamError
from layerstream.timeline import Timeline
from profiles.loads import LayerLoad, Load, overlap_ratio, timeline_load, trace_loads
from profiles.traces import read_trace

HEADER = ("layer", "loads", "load ms", "GB/s", "compute ms", "stall ms")
WIDTH = 110
"""Columns where the output is no terminal."""


def layer_rows(loads: Sequence[Load]) -> list[tuple[str, ...]]:
    """The table: a layer a line, means over the loads it was part of."""
    layers: dict[str, list[LayerLoad]] = defaultdict(list)
    for load in loads:
        for layer in load.layers:
            layers[layer.label].append(layer)
    rows: list[tuple[str, ...]] = []
    for label, each in layers.items():
        seconds = [layer.end - layer.begin for layer in each]
        rows.append(
            (
                label,
                str(len(each)),
                _ms(seconds),
                _rate(sum(layer.nbytes for layer in each), sum(seconds)),
                _ms([layer.compute for layer in each if layer.compute is not None]),
                _ms([layer.stall for layer in each if layer.stall is not None]),
            )
        )
    return rows


def summary(loads: Sequence[Load]) -> list[str]:
    """What holds over all layers, a line each."""
    lines = []
    for gated, kind in ((True, "gated"), (False, "not gated layer by layer, not in the ratio")):
        some = [load for load in loads if load.gated is gated]
        if some:
            nbytes, seconds = sum(load.nbytes for load in some), sum(load.seconds for load in some)
            lines.append(f"{len(some)} load(s), {kind}: {nbytes / 1e6:.1f} MB at {_rate(nbytes, seconds)} GB/s")
    ratio = overlap_ratio(loads)
    if ratio is not None:
        stall = sum(load.stall for load in loads if load.gated)
        lines.append(f"exposed stall {stall * 1e3:.3f} ms, overlap ratio {ratio:.3f}")
    return lines


def _ms(seconds: Sequence[float]) -> str:
    return f"{sum(seconds) / len(seconds) * 1e3:.3f}" if seconds else "-"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}" if seconds > 0 and nbytes else "-"


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """With rich where it is installed, else in plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
        for row in (HEADER, *rows):
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(HEADER[0], title="Means over loads", title_justify="left")
    for name in HEADER[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table, markup=False)


def draw(loads: Sequence[Load], path: Path) -> None:
    """Draw the table: a layer a row, its load above, its compute and what the compute stream waited for it below.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from layerstream.picture import COMPUTE, LOAD, WAIT

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib, which cannot be imported; pip install 'layerstream[plot]'"
        ) from error
    rows = layer_rows(loads)
    figure = Figure(figsize=(9.0, min(14.0, 1.6 + 0.22 * len(rows))), dpi=160, layout="constrained")
    axes: Any = figure.add_subplot()
    columns = [[0.0 if row[column] == "-" else float(row[column]) for row in rows] for column in (2, 4, 5)]
    load, compute, stall = columns
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], load, height=0.4, color=LOAD, label="load")
    axes.barh([place + 0.2 for place in places], stall, height=0.4, color=WAIT, label="exposed stall")
    axes.barh([place + 0.2 for place in places], compute, left=stall, height=0.4, color=COMPUTE, label="compute")
    axes.set_yticks(places, [row[0] for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("milliseconds, means over loads")
    axes.set_title(summary(loads)[-1], loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, facecolor="white")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 2 where a recording is of no use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, metavar="RECORDING")
    parser.add_argument("--step", type=int, help="only the step of this number")
    parser.add_argument("--stream", type=int, help="number of the compute stream, if the busiest one is not it")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the table as well")
    options = parser.parse_args(arguments)
    try:
        loads: list[Load] = []
        for path in options.recordings:
            found = read_trace(path)
            loads += [timeline_load(found)] if isinstance(found, Timeline) else trace_loads(found, options.stream)
        if options.step is not None:
            there = sorted({load.step for load in loads if load.step is not None})
            loads = [load for load in loads if load.step == options.step]
            if not loads:
                raise ConfigError(f"--step {options.step}: no load was recorded in that step; there are {there}")
        print_table(layer_rows(loads))
        print("\n".join(summary(loads)))
        if options.png is not None:
            draw(loads, options.png)
    except (LayerStreamError, OSError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
