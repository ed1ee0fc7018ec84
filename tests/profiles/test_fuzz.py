from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from profiles import fuzz


@pytest.fixture(autouse=True)
def loud_afterwards() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_a_failure_comes_with_what_repeats_it() -> None:
    seed, statistics, failure = fuzz.run_round(5, "saves run ahead", engines=30, shrink=False)
    assert (seed, statistics["machines"] > 0) == (5, True)
    assert failure is not None
    assert "state.start(setup=Setup(" in failure
    (blob,) = re.findall(r"@reproduce_failure\('[\d.]+', b'(.+)'\)", failure)
    again = fuzz.run_round(6, "saves run ahead", blob)[2]
    assert again is not None
    assert fuzz.run_round(6, None, blob)[2] is None


def test_an_unknown_fault_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--fault", "no such"]) == 2
    assert "'no such'; there are dropped pin, dropped hold" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_long_form_writes_what_it_has_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fuzz.json"
    assert fuzz.main(["--minutes", "0", "--processes", "1", "--out", str(out)]) == 0
    seen = json.loads(out.read_text())
    assert (seen["failure"], seen["rounds"]) == (None, 1)
    assert seen["steps"] > 1000
    assert "seed 0: " in capsys.readouterr().out
