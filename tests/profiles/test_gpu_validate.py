"""The validation itself: how it judges, what it survives, that its checks see what is wrong, and that the code for GPUs
runs, on pretended streams."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from layerstream import calibration
from layerstream.cli.results import read_results
from layerstream.engine import StreamEngine
from layerstream.graphs import in_graph
from layerstream.rate_table import PathRate, RateTable
from profiles.gpu_validate import __main__ as command
from profiles.gpu_validate import (
    exact_kernels,
    full_graphs,
    idle,
    interference,
    kernel_rates,
    layouts,
    mini,
    ordering,
    paths,
    pinning,
    plots,
    scenes,
    spinning,
    world,
)
from profiles.gpu_validate.apart import run_apart
from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.checks import OUT_OF_TIME, Check, Part, last_line, run_check
from profiles.gpu_validate.parts import PARTS
from profiles.gpu_validate.rows import (
    Row,
    Target,
    failed,
    faults,
    inconclusive,
    met,
    not_run,
    right,
    row_from,
    row_json,
    table,
)
from tests.rigs.pretend_cuda import Grid, pretend_cuda

ROWS: dict[str, tuple[Row, str]] = {
    "right": (right("r"), "yes"),
    "wrong": (right("r", ["gather"]), "no"),
    "not run": (not_run("r", "no CUDA device"), "not run"),
    "error": (failed("r", "CUDA error"), "no"),
    "inconclusive": (inconclusive("r", "nothing seen"), "inconclusive"),
    "no samples": (Row(name="r", target=Target(relation="<=", value=1.0)), "no"),
    "no target": (Row(name="r", samples=[1.0]), "measured only"),
    "reached": (Row(name="r", samples=[0.96, 0.97] * 4, target=Target(relation=">=", value=0.95)), "yes"),
    "missed": (Row(name="r", samples=[0.93, 0.94] * 4, target=Target(relation=">=", value=0.95)), "no"),
    "on both sides": (
        Row(name="r", samples=[0.90, 0.99] * 4, target=Target(relation=">=", value=0.95)),
        "unresolved, n = 8",
    ),
    "too few": (Row(name="r", samples=[9e-6] * 5, target=Target(relation="<=", value=20e-6)), "unresolved, n = 5"),
    "short": (Row(name="r", samples=[9e-6] * 6, target=Target(relation="<=", value=20e-6)), "yes"),
    "long": (Row(name="r", samples=[21e-6] * 6, target=Target(relation="<", value=20e-6)), "no"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Teams of threads on a busy machine take longer than what they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Pretended(Bench):
    @property
    def cuda(self) -> bool:
        return True


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(place=torch.device("cpu"), quick=True, deadline=time.monotonic() + 100, out=tmp_path)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with pretend_cuda(world, exact_kernels, pinning, calibration) as api:
        kernels = api.kernels()
        monkeypatch.setattr(kernel_rates, "gather_pages", kernels.gather_pages)
        monkeypatch.setattr(kernel_rates, "scatter_pages", kernels.scatter_pages)
        monkeypatch.setattr(kernel_rates, "serving_layouts", lambda _: layouts.serving_layouts(8))
        monkeypatch.setattr(kernel_rates, "L2_PROOF_BYTES", 1 << 16)
        yield Pretended(place=torch.device("cpu"), quick=True, deadline=time.monotonic() + 100, out=tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SHAPES", ((4 << 10, 48),))
    monkeypatch.setattr(exact_kernels, "serving_layouts", lambda _: layouts.serving_layouts(8))
    monkeypatch.setattr(exact_kernels, "odd_layouts", lambda _: layouts.odd_layouts(8)[:5])
    monkeypatch.setattr(
        exact_kernels, "far_layout", lambda word: layouts.spaced("far", 3, 16 * word, runs=2, offset=word)
    )
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 8 << 20)
    monkeypatch.setattr(idle, "CALLS", 3)
    monkeypatch.setattr(interference, "LAYERS", 2)
    monkeypatch.setattr(interference, "SIDE", 64)
    monkeypatch.setattr(interference, "busy_kernel", Grid())


@pytest.mark.parametrize(("row", "verdict"), ROWS.values(), ids=ROWS.keys())
def test_every_row_is_judged(row: Row, verdict: str) -> None:
    assert met(row) == verdict
    assert (faults([row]) == [row]) == (verdict in {"no", "inconclusive"})
    assert verdict in table([row])
    assert row_from(json.loads(json.dumps(row_json(row)))) == row


def test_pairs_keep_their_ratio_in_json() -> None:
    row = Row.of_pairs("r", [(1.0, 2.0), (3.0, 4.0)], target=Target(relation="<=", value=1.03))
    assert row_from(json.loads(json.dumps(row_json(row)))) == row


def test_the_table_has_what_measured_target_met_and_note() -> None:
    rows = [
        Row(name="rate", samples=[0.961] * 6, target=Target(relation=">=", value=0.95), note="a note " * 30),
        right("bytes", ["layer 3"]),
    ]
    head, _, first, *rest = table(rows).splitlines()
    assert head.split() == ["what", "measured", "target", "met", "note"]
    assert first.split()[:5] == ["rate", "0.961", ">=", "0.95", "yes"]
    assert rest[-1].split() == ["bytes", "WRONG", "right", "no", "layer", "3"]
    assert " ".join(" ".join([first, *rest[:-1]]).split()).count("a note") == 30


def test_the_line_that_tells_the_error_is_found() -> None:
    text = (
        "CUDA error: an illegal memory access was encountered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    assert last_line(text) == "CUDA error: an illegal memory access was encountered"
    assert last_line("a\nb\n\n") == "b"
    assert last_line("") == "no message"


def test_checks_for_gpus_and_checks_out_of_time_are_not_begun(bench: Bench) -> None:
    run = mock.Mock(side_effect=AssertionError)
    (row,) = run_check(Check("c", run, gpu_only=True), bench)
    assert (met(row), row.failure) == ("not run", "not run: no CUDA device")
    (row,) = run_check(Check("c", run), dataclasses.replace(bench, deadline=0.0))
    assert (met(row), row.failure) == ("no", OUT_OF_TIME)


PLANTED = """
import os, time
from profiles.gpu_validate.checks import Check, Part
from profiles.gpu_validate.rows import right

def good(bench):
    yield right("good")

def raises(bench):
    yield right("before it raised")
    raise ValueError("planted")

def hangs(bench):
    yield right("before it hung")
    time.sleep(600)

def dies(bench):
    print("CUDA error: planted")
    os._exit(9)
    yield

PARTS = (
    Part("planted", 60.0, (
        Check("raises", raises), Check("hangs", hangs, limit_s=0.5), Check("dies", dies), Check("good", good),
    )),
    Part("other", 60.0, (Check("good", good),)),
)
"""


def test_what_raises_hangs_or_dies_costs_its_own_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted_parts.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    assert command.main(["--parts", "planted_parts", "--only", "planted", "--out", str(out)]) == 1
    results = read_results(out / "gpu_validate.json")
    assert [(row.name, met(row), row.failure) for row in results.rows] == [
        ("before it raised", "yes", ""),
        ("raises", "no", "ValueError: planted"),
        ("before it hung", "yes", ""),
        ("hangs", "no", "it hangs: its process was ended"),
        ("dies", "no", "its process ended with status 9: CUDA error: planted"),
        ("good", "yes", ""),
    ]
    assert {"device", "driver", "CUDA"} <= results.machine.keys()
    assert {"python", "torch", "triton"} <= results.versions.keys()
    shown = capsys.readouterr().out
    assert table(results.rows) in shown
    assert "3 rows are not good: raises; hangs; dies" in shown


def test_a_part_without_time_says_so(tmp_path: Path) -> None:
    part = Part("late", 0.0, (Check("first", lambda _: iter(())), Check("second", lambda _: iter(()))))
    assert [(row.name, row.failure) for row in run_apart(part, tmp_path, [])] == [
        ("first", OUT_OF_TIME),
        ("second", OUT_OF_TIME),
    ]


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("right", "not run", "no target", "reached"), 0),
        (("right", "on both sides"), 0),
        (("right", "missed"), 1),
        (("right", "wrong"), 1),
        (("right", "error"), 1),
        (("right", "inconclusive"), 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(tmp_path: Path, names: tuple[str, ...], status: int) -> None:
    rows = [ROWS[name][0] for name in names]
    with mock.patch.object(command, "run_apart", side_effect=[iter(rows)]):
        assert command.main(["--only", "idle", "--out", str(tmp_path)]) == status


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "kernel", "--out", str(tmp_path)]) == 2
    assert "no part is called kernel; there are kernels, paths" in capsys.readouterr().err


def all_checks() -> list[Any]:
    return [pytest.param(check, id=check.title) for part in PARTS for check in part.checks]


@pytest.mark.parametrize("check", all_checks())
def test_without_a_gpu_every_check_ends_well(bench: Bench, check: Check) -> None:
    rows = list(run_check(check, bench))
    assert rows
    assert not faults(rows), table(rows)
    assert all(met(row) == "not run" for row in rows) == check.gpu_only


BLIND = {"ordering: tables": "CPU memory that is given away is not used again at once"}
"""Checks whose controls cannot go wrong on pretended streams."""


@pytest.mark.parametrize("check", all_checks())
def test_the_code_for_gpus_runs_on_pretended_streams(gpu: Bench, check: Check) -> None:
    rows = list(run_check(check, gpu))
    assert rows
    for row in rows:
        if check.title in BLIND:
            assert met(row) == "inconclusive"
        elif row.target == Target(relation="=", value=1.0):
            assert met(row) == "yes", table(rows)
        else:
            # Rates mean nothing here, but there has to be one; how many uploads fit into a load is chance.
            assert row.samples or "no upload ended" in row.failure, table(rows)


def test_wrong_kernels_are_seen(bench: Bench) -> None:
    copier = exact_kernels.Copier(bench)
    whole = copier.kernels

    def beside(dst: torch.Tensor, src: torch.Tensor, *others: Any, **options: Any) -> None:
        whole.gather_pages(dst, src, *others, **options)
        dst[-1] = 0

    def shifted(*args: Any, **options: Any) -> None:
        whole.scatter_layers(*args[:-1], args[-1].roll(1), **options)

    copier.kernels = whole._replace(gather_pages=beside, scatter_layers=shifted)
    for rows, side in (
        (exact_kernels.pages_are_exact(bench, copier), "gather"),
        (exact_kernels.stacks_are_exact(bench, copier), "scatter"),
    ):
        for row in rows:
            assert met(row) == "no"
            assert side in row.note


@pytest.mark.parametrize("direction", ["load", "save"])
def test_one_wrong_byte_of_a_path_is_seen(bench: Bench, direction: str) -> None:
    """One that was moved wrongly, and one beside it."""
    with world.world(bench, layers=2, blocks=16, page_bytes=512, pool_pages=8) as here:
        here.fill_pool(8, seed=1)
        here.poison()
        path, move = here.path("staged"), here.move(8)
        run, find = getattr(here, direction), getattr(here, f"wrong_after_{direction}")
        here.seconds(run(path, move, here.queued()))
        assert find(move) == []
        here.pages(1)[int(move.block_ids[3])][7] ^= 1
        assert [what.split(":")[0] for what in find(move)] == ["layer 1"]
        if direction == "load":
            here.pages(0)[min(set(range(16)) - set(move.block_ids.tolist()))][511] = 0
            assert len(find(move)) == 2


def test_a_control_that_goes_right_makes_its_row_inconclusive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no edge were ever left out."""
    edge = ordering.path_edges()[0]
    monkeypatch.setattr(ordering, "path_edges", lambda: [edge])
    monkeypatch.setattr(ordering, "scene", lambda bench, path, _: scenes.scene(bench, path, None))
    (row,) = ordering.edges_hold(bench)
    assert met(row) == "inconclusive"


def test_a_missing_edge_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package itself lacked the first edge."""
    edge = ordering.path_edges()[0]
    monkeypatch.setattr(ordering, "path_edges", lambda: [edge])
    cut = (edge.recorded_on, edge.waits)
    monkeypatch.setattr(ordering, "scene", lambda bench, path, _: scenes.scene(bench, path, cut))
    (row,) = ordering.edges_hold(bench)
    assert met(row) == "no"
    assert "layer 0" in row.note


def test_every_path_and_scenario_has_its_edges() -> None:
    edges = ordering.path_edges()
    assert {edge.path for edge in edges} == {"staged", "zero_copy", "batch_dma", "graph"}
    assert {edge.scenario for edge in edges} == set(ordering.SCENARIOS)
    assert len({(edge.law, edge.path) for edge in edges}) == len(edges)


def test_an_operation_of_an_idle_step_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = StreamEngine.poll

    def busy(engine: StreamEngine) -> object:
        engine.device.event()
        return poll(engine)

    monkeypatch.setattr(StreamEngine, "poll", busy)
    row = next(iter(idle.idle_steps_cost_nothing(bench)))
    assert (met(row), row.note) == ("no", "it added 1")


def test_logits_that_differ_are_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mini.example("mini_engine").MiniEngine
    wipe = engine.wipe

    def and_spoil(self: Any, request: Any) -> None:
        wipe(self, request)
        self.streamer.pool.span(1, request.pool_page, 1).zero_()

    monkeypatch.setattr(engine, "wipe", and_spoil)
    row = next(iter(mini.served("eager", {"transfer_path": "staged"}, graphs=False)(bench)))
    assert met(row) == "no", row


def test_the_shortest_tail_that_hides_its_load_is_taken(gpu: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "TAILS", (16, 32, 48))
    full = dataclasses.replace(gpu, quick=False)
    with mini.engine(gpu, graphs=False, options={"transfer_path": "staged"}) as (made, prompt):
        monkeypatch.setattr(mini, "BALANCE", 0.0)
        tail, found = mini.balanced_tail(full, made, prompt)
        assert tail == 16
        assert "no tail tried" not in found
        monkeypatch.setattr(mini, "BALANCE", 1e9)
        tail, found = mini.balanced_tail(full, made, prompt)
        assert tail == 48
        assert "no tail tried" in found


@pytest.mark.parametrize("kind", ["flags", "events"])
def test_gates_that_open_too_early_are_seen(gpu: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    gates = in_graph.FlagGates if kind == "flags" else in_graph.EventGates
    monkeypatch.setattr(gates, "try_arm", lambda *_: True)
    monkeypatch.setattr(gates, "open", lambda *_: None)
    rows = {row.name: row for row in full_graphs.in_graph_waits(kind)(gpu)}
    assert met(rows[f"in-graph {kind}: a delayed load is waited for"]) == "no"
    assert met(rows[f"in-graph {kind}: two steps in flight"]) == "no"


def test_the_busy_kernel_computes_in_every_block() -> None:
    out = torch.zeros(2 * 64)
    InterpretedFunction(spinning.busy_kernel.fn)[(2,)](out, 3, BLOCK=64)
    expected = torch.arange(128) * 1e-6
    for _ in range(3):
        expected = expected * 0.999 + 1e-3
    assert torch.allclose(out, expected)


def rates() -> RateTable:
    found = tuple(
        PathRate(path=path, direction=direction, page_bytes=size, blocks=blocks, seconds=size * blocks / 50e9)
        for path in ("staged", "zero_copy")
        for direction in ("load", "save")
        for size in (4096, 65536)
        for blocks in (4, 64)
    )
    return RateTable(device="d", software={}, roofs={"load": 55e9, "save": 54e9}, rates=found)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    assert plots.draw_rates(rates(), tmp_path / "rates.png") == "rates.png"
    points = {"products": {"staged": [(2, 1.01, 40e9), (8, 1.1, 50e9)]}, "kernels": {"graph": [(8, 1.0, 50e9)]}}
    assert plots.draw_interference(points, tmp_path / "interference.png") == "interference.png"
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("rates.png", "interference.png"))


def test_without_matplotlib_one_line_says_so(tmp_path: Path) -> None:
    with mock.patch.dict("sys.modules", {"matplotlib.figure": None}):
        assert plots.draw_rates(rates(), tmp_path / "rates.png") == plots.NO_PICTURE
        assert plots.draw_interference({"step": {}}, tmp_path / "i.png") == plots.NO_PICTURE
    assert not list(tmp_path.iterdir())


def test_budgets_fit_in_eight_minutes_or_are_cut() -> None:
    assert command.TOTAL_S + 10 <= 8 * 60
    assert sum(part.budget_s for part in PARTS) <= 1.1 * command.TOTAL_S
    assert all(check.limit_s <= part.budget_s for part in PARTS for check in part.checks if check.limit_s != 60.0)
