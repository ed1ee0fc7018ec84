"""Pictures of a validation. Without matplotlib there are none, and that is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerstream.picture import COMPUTE, LOAD, WAIT

if TYPE_CHECKING:
    from layerstream.rate_table import RateTable

NO_PICTURE = "no picture: matplotlib is not installed"
NO_BLOCKS = 1
"""Stands for none on the logarithmic axis."""
_COLORS = {"staged": LOAD, "zero_copy": WAIT, "batch_dma": COMPUTE}
_OTHER = "#7048a8"
_INK, _FAINT = "#1f2933", "#d5dbe1"


def _figure(width: float, columns: int) -> tuple[Any, Any] | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, 4.2), dpi=160, layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _dress(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)


def draw_rates(table: RateTable, path: Path) -> str:
    """Rate against page size for the largest transfers measured, one panel a direction, one line a path, and the rate
    of one large copy as a dashed line. Returns the picture's path, or why there is none."""
    made = _figure(9.0, 2)
    if made is None:
        return NO_PICTURE
    figure, panels = made
    sizes = table.page_sizes()
    for axes, direction in zip(panels, ("load", "save"), strict=True):
        for name in sorted({rate.path for rate in table.rates}):
            of_size = {
                size: max(
                    (
                        rate
                        for rate in table.rates
                        if (rate.path, rate.direction, rate.page_bytes) == (name, direction, size)
                    ),
                    key=lambda rate: rate.blocks,
                    default=None,
                )
                for size in sizes
            }
            points = [(size, rate.bytes_per_s / 1e9) for size, rate in of_size.items() if rate is not None]
            axes.plot(
                *zip(*points, strict=True), color=_COLORS.get(name, _OTHER), marker="o", markersize=3.5, label=name
            )
        if direction in table.roofs:
            axes.axhline(
                table.roofs[direction] / 1e9, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), label="one copy"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size >> 10}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0.0)
        _dress(axes, "host to GPU" if direction == "load" else "GPU to host", "KiB of a page", "GB/s")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(f"Transfer paths on {table.device}", color=_INK, fontsize=11.5)
    figure.savefig(path, facecolor="white")
    return path.name


def draw_interference(slowdowns: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]], path: Path) -> str:
    """How much slower a step becomes beside a load, against the copy's thread blocks; one panel a kind of step.

    Args:
        slowdowns: step -> path -> (thread blocks or NO_BLOCKS, step beside the load / alone, bytes per second).
        path: file to write.

    Returns:
        The picture's path, or why there is none.
    """
    made = _figure(4.6 * len(slowdowns), len(slowdowns))
    if made is None:
        return NO_PICTURE
    figure, panels = made
    for axes, (step, paths) in zip(panels, slowdowns.items(), strict=True):
        for name, points in paths.items():
            blocks, ratios, rates = zip(*points, strict=True)
            label = f"{name}, up to {max(rates) / 1e9:.0f} GB/s"
            axes.plot(blocks, ratios, color=_COLORS.get(name, _OTHER), marker="o", markersize=3.5, label=label)
        axes.axhline(1.0, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        ticks = sorted({count for points in paths.values() for count, _, _ in points})
        axes.set_xticks(ticks, ["none" if count == NO_BLOCKS else f"{count}" for count in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9)
        _dress(axes, step, "most thread blocks of the copy", "step beside a load / alone")
    figure.savefig(path, facecolor="white")
    return path.name
