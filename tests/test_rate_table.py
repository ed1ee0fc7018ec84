"""What a calibration's table says and how it is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from layerstream.rate_table import PathRate, RateTable, rate_file, read_rates

SOFTWARE = {"torch": "2.13.0", "driver": "580.1"}


def rate(path: str, blocks: int, milliseconds: float, *, page: int = 65536, direction: str = "load") -> PathRate:
    return PathRate(path=path, direction=direction, page_bytes=page, blocks=blocks, seconds=milliseconds / 1e3)


def table(*rates: PathRate) -> RateTable:
    return RateTable(device="a GPU", software=SOFTWARE, roofs={"load": 5e10, "save": 4e10}, rates=rates)


def test_the_fastest_path_of_each_size_is_chosen() -> None:
    rates = (
        *(rate("staged", blocks, t) for blocks, t in ((4, 1.0), (16, 2.0), (64, 4.0), (256, 16.0))),
        *(rate("zero_copy", blocks, t) for blocks, t in ((4, 0.5), (16, 1.0), (64, 5.0), (256, 20.0))),
        *(rate("batch_dma", blocks, t) for blocks, t in ((4, 2.0), (16, 3.0), (64, 4.0), (256, 8.0))),
        rate("zero_copy", 256, 0.1, direction="save"),
    )
    assert table(*rates).fastest_loads(65536) == [(0, "zero_copy"), (32, "staged"), (128, "batch_dma")]


@pytest.mark.parametrize(("milliseconds", "path"), [(0.96, "staged"), (0.94, "zero_copy")])
def test_the_default_stays_where_another_is_hardly_faster(milliseconds: float, path: str) -> None:
    assert table(rate("staged", 4, 1.0), rate("zero_copy", 4, milliseconds)).fastest_loads(65536) == [(0, path)]


@pytest.mark.parametrize(("page", "path"), [(4096, "zero_copy"), (10_000, "zero_copy"), (30_000, "staged")])
def test_the_nearest_measured_page_size_counts(page: int, path: str) -> None:
    rates = (
        rate("staged", 4, 1.0, page=4096),
        rate("zero_copy", 4, 0.1, page=4096),
        rate("staged", 4, 1.0),
        rate("zero_copy", 4, 9.0),
    )
    assert table(*rates).fastest_loads(page) == [(0, path)]


def test_of_each_size_the_fastest_time_of_a_load_is_told() -> None:
    rates = table(
        rate("staged", 64, 4.0), rate("staged", 4, 1.0), rate("zero_copy", 4, 0.5),
        rate("zero_copy", 4, 0.1, direction="save"), rate("staged", 4, 0.1, page=4096),
    )  # fmt: skip
    assert rates.fastest_seconds(65536) == [(4 * 65536, 0.0005), (64 * 65536, 0.004)]
    assert rates.fastest_seconds(8192) == []


def test_joined_tables_keep_the_newer_of_two_equal_points() -> None:
    joined = table(rate("staged", 4, 1.0), rate("staged", 16, 2.0)).joined(
        [rate("staged", 4, 3.0), rate("staged", 4, 7.0, page=4096)]
    )
    assert {(r.page_bytes, r.blocks): r.seconds for r in joined.rates} == {
        (65536, 4): 0.003,
        (65536, 16): 0.002,
        (4096, 4): 0.007,
    }
    assert joined.page_sizes() == [4096, 65536]


def test_a_rate_is_bytes_over_time() -> None:
    assert rate("staged", 16, 1.0).bytes_per_s == pytest.approx(65536 * 16 / 1e-3)


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = table(rate("staged", 4, 1.0), rate("zero_copy", 4, 0.5, direction="save"))
    file = written.write(tmp_path / "not made yet")
    assert read_rates(file.parent, "a GPU", SOFTWARE) == written
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(("device", "software"), [("another GPU", SOFTWARE), ("a GPU", {**SOFTWARE, "driver": "590"})])
def test_another_device_or_driver_has_another_table(tmp_path: Path, device: str, software: dict[str, str]) -> None:
    written = table(rate("staged", 4, 1.0))
    written.write(tmp_path)
    assert read_rates(tmp_path, device, software) is None
    dataclasses.replace(written, device=device, software=software).write(tmp_path)
    assert read_rates(tmp_path, "a GPU", SOFTWARE) == written


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"blocks"', '"block"'),
        lambda text: text.replace('"a GPU"', '"a clone"'),
        lambda text: json.dumps({**json.loads(text), "rates": []}),
        lambda text: json.dumps({**json.loads(text), "rates": 5}),
        lambda text: json.dumps({**json.loads(text), "more": 1}),
    ],
    ids=["empty", "cut", "list", "null", "version", "field", "device", "no points", "no list", "more"],
)
def test_a_damaged_table_counts_as_absent(tmp_path: Path, damage: object) -> None:
    file = table(rate("staged", 4, 1.0)).write(tmp_path)
    assert file == rate_file(tmp_path, "a GPU", SOFTWARE)
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    assert read_rates(tmp_path, "a GPU", SOFTWARE) is None
