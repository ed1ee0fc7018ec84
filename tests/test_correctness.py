"""Every field report is accounted for, by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
ROWS = {row[1]: row[0] for row in re.finditer(r"^\| (B\d\d) \|.*$", TEXT, re.MULTILINE)}
REPORTS = [
    *("B02", "B03", "B04", "B05", "B07", "B08", "B09", "B12", "B13", "B15", "B16", "B17", "B19", "B20", "B21", "B22"),
    *("B23", "B25", "B26", "B27", "B29", "B30", "B31", "B32", "B33", "B34", "B36", "B37", "B38", "B39", "B40", "B41"),
    *("B44", "B45", "B46", "B47", "B48", "B49", "B50", "B51", "B53", "B54", "B55", "B56", "B57", "B58", "B59", "B60"),
    "B61",
]


def test_every_report_has_its_row() -> None:
    assert list(ROWS) == REPORTS


@pytest.mark.parametrize("report", REPORTS)
def test_the_tests_of_a_report_exist(report: str) -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", ROWS[report])
    assert named
    for file, name in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name or 'test_'}" in source or (not name and "TestCase" in source), f"{file}::{name}"
