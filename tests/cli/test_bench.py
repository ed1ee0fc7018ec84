from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from layerstream.cli import bench
from layerstream.cli.results import Results, Row, Target, markdown, read_results
from layerstream.errors import ConfigError
from layerstream.trials import Interval

AT_MOST = Target(relation="<=", value=1.05)


def steady(value: float, n: int = 12) -> list[float]:
    return [value * (1 + 1e-3 * (step - (n - 1) / 2)) for step in range(n)]


def row(value: float = 1.0, name: str = "ttft", **others: Any) -> Row:
    return Row(**{"name": name, "samples": steady(value), "target": AT_MOST, **others})


def run(*rows: Row, **others: Any) -> Results:
    facts: dict[str, Any] = {
        "started": datetime(2026, 11, 30, 9, 50, tzinfo=UTC),
        "settings": {"pairs at most": 30},
        "machine": {"kind": "cpu-2core", "cores": 2, "load average at start": "0.1"},
        "versions": {"torch": "2.13.0"},
        "commit": "abc",
    }
    return Results(**{**facts, **others}, rows=list(rows))


def compared(tmp_path: Path, before: Results, after: Results) -> int:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, results in zip(paths, (before, after), strict=True):
        path.write_text(results.to_json())
    return bench.run_compare(*paths)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results = run(
        row(unit="us", scale=1e6, digits=1, note="note"),
        Row.of_pairs("pairs", [(1.0, 2.0), (3.0, 4.0)]),
        Row(name="none", failure="no GPU"),
    )
    path = tmp_path / "results.json"
    path.write_text(results.to_json())
    assert read_results(path) == results


def test_the_recorded_run_is_read(tmp_path: Path) -> None:
    for path in (Path(__file__).parents[2] / "profiles" / "results").glob("*.json"):
        results = read_results(path)
        assert results.rows
        assert results.commit in markdown(results)


def test_a_row_that_met_its_target_and_misses_it_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, run(row(1.0)), run(row(1.2))) == 1
    printed = capsys.readouterr().out
    assert "1.200 [" in printed
    assert "met, then missed" in printed
    assert "Met in A, missed in B: ttft" in printed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (row(1.2), row(1.3)),
        (row(1.0), row(1.01)),
        (row(1.0), row(samples=[0.9, 1.2, 0.9, 1.2, 0.9, 1.2])),
        (row(1.0), row(samples=[], failure="no engine")),
        (row(1.0, target=None), row(9.0, target=None)),
    ],
    ids=["missed before", "still met", "unresolved", "not measured", "no target"],
)
def test_anything_else_is_status_0(tmp_path: Path, before: Row, after: Row) -> None:
    assert compared(tmp_path, run(before), run(after)) == 0


@pytest.mark.parametrize("target", [None, Target(relation="<=", value=9.0)], ids=["dropped", "loosened"])
def test_a_target_that_moved_hides_nothing(tmp_path: Path, target: Target | None) -> None:
    assert compared(tmp_path, run(row(1.0)), run(row(1.2, target=target))) == 1


def test_rows_of_one_side_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, run(row(name="both"), row(name="old [1]")), run(row(name="both"), row(name="new"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("only in")] == ["old [1]", "new"]


def test_a_row_that_failed_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, run(row(1.0)), run(row(samples=[], failure="no engine")))
    assert "ttft: not measured in B: no engine" in capsys.readouterr().out


def test_other_machines_versions_and_settings_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {"kind": "nvidia-h200", "cores": 16, "GPU": "H200", "load average at start": "3.0"}
    assert compared(tmp_path, run(row()), run(row(), machine=machine, versions={"torch": "2.11.0"}, settings={})) == 0
    printed = capsys.readouterr().out
    assert "WARNING" in printed
    for line in (
        "kind: cpu-2core in A, nvidia-h200 in B",
        "cores: 2 in A, 16 in B",
        "GPU: unknown in A, H200 in B",
        "torch: 2.13.0 in A, 2.11.0 in B",
        "pairs at most: 30 in A, unknown in B",
    ):
        assert line in printed
    assert "load average" not in printed


def test_the_same_machine_is_not_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = {"kind": "cpu-2core", "cores": 2, "load average at start": "9.9"}
    compared(tmp_path, run(row()), run(row(), machine=busy))
    assert "WARNING" not in capsys.readouterr().out


def test_exact_rows_have_no_ratio_and_one_wrong_sample_is_a_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = row(target=Target(relation="=", value=1), samples=[1, 1, 1], digits=0)
    assert compared(tmp_path, run(exact), run(replace(exact, samples=[1, 1, 2]))) == 1
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[4].split("│")]
    assert cells[1:7] == ["ttft", "1", "2", "-", "= 1", "met, then missed"]


def test_the_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    ratio = bench.ratio_of_medians([2.0, 2.2, 1.8, 9.0, 2.1], [1.0, 1.1, 0.9])
    assert ratio is not None
    assert ratio.median == 2.1
    assert ratio.low < 2.1 < ratio.high
    assert ratio.samples == 3
    assert bench.ratio_of_medians([3.0], [1.5]) == Interval(median=2.0, low=2.0, high=2.0, samples=1)


@pytest.mark.parametrize(("first", "second"), [([], [1.0]), ([1.0], []), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_there_is_no_ratio_of_what_is_not_above_zero(first: list[float], second: list[float]) -> None:
    assert bench.ratio_of_medians(first, second) is None


GOOD = json.loads(run(row()).to_json())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "it has no 'started'"),
        (json.dumps({**GOOD, "started": "yesterday"}), "Invalid isoformat"),
        (json.dumps({**GOOD, "rows": {}}), "'rows' is dict, not list"),
        (json.dumps({**GOOD, "rows": [7]}), "'row' is int, not dict"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "colour": 1}]}), "unknown fields colour"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "digits": "1"}]}), "'digits' is str"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "scale": None}]}), "holds None"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "samples": ["1"]}]}), "holds '1' where a finite number"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "samples": [float("nan")]}]}), "holds nan"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "pairs": [[1]]}]}), "unpack"),
        (json.dumps({**GOOD, "rows": [{"name": "x", "target": {"relation": "~", "value": 1}}]}), "none of <="),
        (json.dumps({**GOOD, "rows": [{"name": "x", "target": 5}]}), "no 'relation'"),
    ],
)
def test_a_file_that_holds_no_results_is_refused_and_named(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"make bench") as refused:
        bench.run_compare(path, path)
    assert "other.json" in str(refused.value)
    assert reason in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read \(No such file"):
        bench.run_compare(tmp_path / "gone.json", tmp_path / "gone.json")


def test_the_command_line_compares_and_passes_the_status_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from layerstream.cli import app

    (tmp_path / "a.json").write_text(run(row(1.0)).to_json())
    (tmp_path / "b.json").write_text(run(row(1.2)).to_json())
    monkeypatch.chdir(tmp_path)
    for arguments, status in ((["--compare", "a.json", "b.json"], 1), (["--compare", "b.json", "a.json"], 0), ([], 2)):
        monkeypatch.setattr("sys.argv", ["layerstream", "bench", *arguments])
        with pytest.raises(SystemExit) as stop:
            app.main()
        assert stop.value.code == status
    assert "--compare A.json B.json" in capsys.readouterr().err
