"""Pictures: of one layerwise load, of what a calibration measured, and of what pools hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerstream.errors import ConfigError

if TYPE_CHECKING:
    from layerstream.rate_table import RateTable
    from layerstream.timeline import Timeline

LOAD, COMPUTE, WAIT = "#2b6cb0", "#8fc9a3", "#d9480f"
PATH_COLORS = {"staged": "#2b6cb0", "zero_copy": "#d9480f", "batch_dma": "#2f9e6e"}
_POLICY_COLORS = ("#2b6cb0", "#d9480f", "#2f9e6e", "#8a5cc2", "#b8860b", "#5f6b76")
_INK, _FAINT = "#1f2933", "#d5dbe1"


def draw_timeline(timeline: Timeline, path: Path, *, hit_tokens: int) -> Path:
    """Draw `timeline` into the image `path`, whose suffix says the format (.png, .svg, .pdf); returns `path`.

    Each layer has two lanes: its load above, its compute below, and in the compute's lane what the compute stream
    waited for the layer. Times are in milliseconds since the load was submitted.

    Args:
        timeline: of one load.
        path: file to write.
        hit_tokens: tokens that were loaded, for the title.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure_of = _figure_class()
    from matplotlib.patches import Patch

    layers = timeline.layers
    figure = figure_of(figsize=(9.0, min(9.0, 2.0 + 0.13 * len(layers))), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for shift, color, spans in (
        (-0.23, LOAD, [(t.load_begin, t.load_end) for t in layers]),
        (0.23, COMPUTE, [(t.gate_end, t.compute_end) for t in layers]),
        (0.23, WAIT, [(t.gate_begin, t.gate_end) for t in layers]),
    ):
        axes.barh(
            [row + shift for row in range(len(layers))],
            [1e3 * (end - begin) for begin, end in spans],
            left=[1e3 * begin for begin, _ in spans],
            height=0.46,
            color=color,
        )
    loaded, ended = (1e3 * max(times) for times in zip(*((t.load_end, t.compute_end) for t in layers), strict=True))
    axes.axvline(loaded, color=LOAD, linewidth=1.0, linestyle=(0, (4, 3)))
    beside = loaded < 0.6 * ended
    axes.annotate(
        f"last byte in place\nafter {loaded:.1f} ms of {max(loaded, ended):.1f} ms",
        # Where bars leave room: right of an early line at the bottom, left of a late one at the top.
        xy=(loaded, 0.03 if beside else 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(7 if beside else -7, 0),
        textcoords="offset points",
        ha="left" if beside else "right",
        va="bottom" if beside else "top",
        color=LOAD,
        fontsize=10,
    )
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.01 * max(loaded, ended))
    axes.set_yticks(range(0, len(layers), max(1, len(layers) // 6)))
    axes.set_ylabel("layer", color=_INK, fontsize=11)
    axes.set_xlabel("milliseconds since the load was submitted", color=_INK, fontsize=11)
    axes.set_title(
        f"{hit_tokens:,} tokens, {timeline.nbytes / 1e6:.0f} MB loaded behind the compute: "
        f"overlap {timeline.overlap_ratio:.3f}, exposed stall {1e3 * timeline.stall_seconds:.2f} ms",
        color=_INK,
        fontsize=11.5,
        loc="left",
        pad=10,
    )
    _style(axes, grid="x")
    named = ((LOAD, "load: host pool to KV cache"), (COMPUTE, "compute"), (WAIT, "compute waits at the layer's gate"))
    figure.legend(
        handles=[Patch(color=color, label=label) for color, label in named],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=10,
    )
    figure.savefig(path, facecolor="white")
    return path


def draw_rates(table: RateTable, path: Path) -> Path:
    """Draw rate against page size for every path and direction, with the device's large copy as a line; returns `path`.

    A path's line has, for each page size, the largest transfer that was measured.

    Args:
        table: what was measured.
        path: file to write; its suffix says the format.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure_class()(figsize=(9.0, 4.0), dpi=160, layout="constrained")
    sizes = table.page_sizes()
    for axes, (direction, title) in zip(
        figure.subplots(1, 2, sharey=True), (("load", "host to device"), ("save", "device to host")), strict=True
    ):
        for name, color in PATH_COLORS.items():
            best = {
                rate.page_bytes: rate.bytes_per_s / 1e9
                for rate in sorted(table.rates, key=lambda rate: rate.blocks)
                if rate.path == name and rate.direction == direction
            }
            shown = [size for size in sizes if size in best]
            axes.plot(shown, [best[size] for size in shown], marker="o", markersize=4, color=color, label=name)
        axes.axhline(table.roofs[direction] / 1e9, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), label="large copy")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size / 1024:g}" for size in sizes], rotation=45 if len(sizes) > 8 else 0)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("page of one layer in KiB", color=_INK, fontsize=11)
        axes.set_title(title, color=_INK, fontsize=11.5, loc="left")
        _style(axes, grid="y")
    figure.axes[0].set_ylabel("GB/s", color=_INK, fontsize=11)
    figure.suptitle(f"Transfer paths on {table.device}", color=_INK, fontsize=12, x=0.01, ha="left")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, facecolor="white")
    return path


def draw_pools(
    policies: Mapping[str, Sequence[tuple[int, float, float]]],
    path: Path,
    *,
    title: str,
    unit: tuple[str, float] = ("host pool of one rank in GiB", 1 << 30),
) -> Path:
    """Draw hit rate and saved prefill against the pool's size, a line for each policy; returns `path`.

    Args:
        policies: name -> (pool size, hit rate, saved part of the prefill) by size; the last one is drawn as a bound.
        path: file to write; its suffix says the format.
        title: what was served.
        unit: name of the axis of sizes, and what sizes are divided by there.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure_class()(figsize=(9.0, 4.2), dpi=160, layout="constrained")
    sizes = sorted({row[0] / unit[1] for rows in policies.values() for row in rows})
    for column, (axes, heading) in enumerate(
        zip(figure.subplots(1, 2), ("tokens hit", "prefill saved"), strict=True), start=1
    ):
        for number, (name, rows) in enumerate(policies.items()):
            bound = number == len(policies) - 1
            axes.plot(
                [row[0] / unit[1] for row in rows],
                [100 * row[column] for row in rows],
                marker=None if bound else "o",
                markersize=4,
                color=_INK if bound else _POLICY_COLORS[number % len(_POLICY_COLORS)],
                linestyle=(0, (4, 3)) if bound else "-",
                linewidth=1.0 if bound else 1.5,
                label=name,
            )
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,.3g}" if size < 1000 else f"{size:,.0f}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(unit[0], color=_INK, fontsize=11)
        axes.set_title(f"{heading}, %", color=_INK, fontsize=11.5, loc="left")
        _style(axes, grid="y")
    figure.suptitle(title, color=_INK, fontsize=12, x=0.01, ha="left")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(policies), frameon=False
    )
    figure.savefig(path, facecolor="white")
    return path


def _figure_class() -> Any:
    try:
        # Not pyplot, whose state is global to the process and which looks for a display.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib, which cannot be imported; pip install 'layerstream[plot]'"
        ) from error
    return Figure


def _style(axes: Any, *, grid: Literal["x", "y"]) -> None:
    axes.tick_params(colors=_INK, length=0, labelsize=10)
    axes.grid(axis=grid, color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
