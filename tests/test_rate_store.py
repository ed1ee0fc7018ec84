from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from layerstream.measured import Measured
from layerstream.rate_store import VERSION, WRITE_EVERY_S, RateStore
from layerstream.rates import LOAD, PREFILL, Rates
from tests.rigs.known_rates import known_rates
from tests.rigs.tiering_rig import Clock

MODEL = b"model"


def store(
    rates: Rates, folder: Path, *, clock: Clock | None = None, machine: str = "m", model: bytes = MODEL
) -> RateStore:
    return RateStore(rates, folder, machine=machine, model=model, clock=clock or Clock())


def learn_one(rates: Rates) -> None:
    rates.learn(Measured(loads=[("staged", 1 << 20, 1e-3)]))


def test_what_one_engine_learned_the_next_one_knows(tmp_path: Path) -> None:
    rates = Rates()
    its = store(rates, tmp_path / "new" / "folder")
    rates.restore(known_rates().state())
    learn_one(rates)
    its.write()
    again = Rates()
    store(again, tmp_path / "new" / "folder")
    assert again.line(LOAD) is not None and again.line(PREFILL) is not None
    assert again.recompute_s(512, 0) == pytest.approx(rates.recompute_s(512, 0), rel=0.05)


@pytest.mark.parametrize("other", [{"machine": "other"}, {"model": b"other"}])
def test_another_machine_or_model_has_another_file(tmp_path: Path, other: dict[str, object]) -> None:
    rates = Rates()
    its = store(rates, tmp_path)
    rates.restore(known_rates().state())
    learn_one(rates)
    its.write()
    again = Rates()
    store(again, tmp_path, **other)  # type: ignore[arg-type]
    assert again.names() == []


def test_it_is_written_rarely_and_only_if_something_was_learned(tmp_path: Path) -> None:
    clock, rates = Clock(), known_rates()
    its = store(rates, tmp_path, clock=clock)
    clock.now += 2 * WRITE_EVERY_S
    its.step()
    assert not its.path.exists()
    learn_one(rates)
    its.step()
    first = its.path.stat().st_mtime_ns
    its.path.unlink()
    learn_one(rates)
    clock.now += WRITE_EVERY_S - 1
    its.step()
    assert not its.path.exists()
    clock.now += 1
    its.step()
    assert its.path.stat().st_mtime_ns >= first
    its.path.unlink()
    its.write()
    assert not its.path.exists()


def test_nothing_known_well_enough_is_nothing_written(tmp_path: Path) -> None:
    rates = Rates()
    its = store(rates, tmp_path)
    learn_one(rates)
    its.write()
    assert list(tmp_path.iterdir()) == []


def write_good(folder: Path) -> Path:
    rates = Rates()
    its = store(rates, folder)
    rates.restore(known_rates().state())
    learn_one(rates)
    its.write()
    return its.path


@pytest.mark.parametrize("damage", ["cut", "empty", "binary", "list", "number", "no rates", "bad rate", "deep"])
def test_a_damaged_file_is_none_and_one_warning(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_good(tmp_path)
    good = path.read_text()
    path.write_bytes(
        {
            "cut": good[: len(good) // 2].encode(),
            "empty": b"",
            "binary": b"\xff\xfe\x00",
            "list": b"[]",
            "number": b"7",
            "no rates": json.dumps({"version": VERSION}).encode(),
            "bad rate": json.dumps({"version": VERSION, "rates": {"load": 1}}).encode(),
            "deep": b"[" * 200_000,
        }[damage]
    )
    rates = Rates()
    its = store(rates, tmp_path)
    assert rates.names() == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.getMessage()
    rates.restore(known_rates().state())
    learn_one(rates)
    its.write()
    again = Rates()
    store(again, tmp_path)
    assert again.line(LOAD) is not None


def test_a_file_of_another_version_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_good(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": VERSION + 1}))
    rates = Rates()
    store(rates, tmp_path)
    assert rates.names() == [] and not caplog.records


def test_a_folder_that_cannot_be_made_is_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    rates = known_rates()
    its = store(rates, tmp_path / "file")
    for _ in range(2):
        learn_one(rates)
        its.write()
    assert len(caplog.records) == 1


def test_a_write_that_breaks_off_leaves_the_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_good(tmp_path)
    before = path.read_bytes()
    rates = Rates()
    its = store(rates, tmp_path)
    learn_one(rates)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    its.write()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert "No space left" in caplog.text
