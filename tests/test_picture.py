from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from layerstream.errors import ConfigError
from layerstream.picture import COMPUTE, LOAD, WAIT, draw_pools, draw_timeline
from layerstream.timeline import LayerTimes, Timeline

matplotlib = pytest.importorskip("matplotlib")


def timeline(layers: int, *, stall: float = 0.0) -> Timeline:
    """Each load takes 1 ms and each layer's compute 4 ms; the first layer is waited for."""
    return Timeline(
        step=1,
        requests=("r",),
        blocks=31,
        nbytes=91_400_000,
        layers=tuple(
            LayerTimes(
                layer=f"model.layers.{index}.self_attn.attn",
                load_begin=0.001 * index,
                load_end=0.001 * (index + 1),
                gate_begin=0.004 * index + (stall if index else 0.0),
                gate_end=0.004 * index + stall,
                compute_end=0.004 * (index + 1) + stall,
            )
            for index in range(layers)
        ),
    )


@pytest.mark.parametrize("layers", [1, 2, 30, 126])
def test_a_png_is_written_for_any_number_of_layers(tmp_path: Path, layers: int) -> None:
    path = draw_timeline(timeline(layers), tmp_path / "timeline.png", hit_tokens=3968)
    assert path == tmp_path / "timeline.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_picture_states_the_facts_and_shows_every_kind_of_bar(tmp_path: Path) -> None:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = draw_timeline(timeline(30, stall=0.0015), tmp_path / "t.svg", hit_tokens=3968).read_text("utf-8")
    assert "3,968 tokens, 91 MB" in svg
    assert "overlap 0.950" in svg and "stall 1.50 ms" in svg
    assert "after 30.0 ms of 121.5 ms" in svg
    for color in (LOAD, COMPUTE, WAIT):
        # A bar for each of 30 layers and the legend's.
        assert svg.count(f"fill: {color}") >= 31


def test_bars_lie_where_the_events_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, tuple[list[float], list[float], list[float]]] = {}
    barh = Axes.barh

    def spy(self: Axes, y: list[float], width: list[float], **options: object) -> object:
        drawn[str(options["color"])] = (y, options["left"], width)  # type: ignore[assignment]
        return barh(self, y, width, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "barh", spy)
    draw_timeline(timeline(3, stall=0.0015), tmp_path / "t.png", hit_tokens=1)
    for color, begins, lengths in (
        (LOAD, [0, 1, 2], [1, 1, 1]),
        (COMPUTE, [1.5, 5.5, 9.5], [4, 4, 4]),
        (WAIT, [0, 5.5, 9.5], [1.5, 0, 0]),
    ):
        rows, left, width = drawn[color]
        assert left == pytest.approx(begins) and width == pytest.approx(lengths)
        assert [round(row) for row in rows] == [0, 1, 2]
    assert drawn[LOAD][0][0] < drawn[COMPUTE][0][0] == drawn[WAIT][0][0]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'layerstream\[plot\]'"):
        draw_timeline(timeline(2), tmp_path / "t.png", hit_tokens=1)


def test_pools_are_drawn_in_percent_with_a_line_for_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    save = matplotlib.figure.Figure.savefig

    def savefig(figure: Any, *args: Any, **more: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **more)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
    rows = {
        "lru": [(1 << 30, 0.25, 0.125), (4 << 30, 0.5, 0.375)],
        "optimum": [(1 << 30, 0.5, 0.25), (4 << 30, 0.75, 0.5)],
    }
    path = draw_pools(rows, tmp_path / "pools.png", title="12 requests")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    hit, saved = drawn[0].axes
    assert [(line.get_label(), *line.get_xydata().tolist()) for line in hit.lines] == [
        ("lru", [1, 25], [4, 50]),
        ("optimum", [1, 50], [4, 75]),
    ]
    assert saved.lines[0].get_ydata().tolist() == [12.5, 37.5]
