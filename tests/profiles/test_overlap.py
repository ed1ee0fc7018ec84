from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstream.errors import ConfigError
from layerstream.timeline import LayerTimes, Timeline
from profiles import overlap
from profiles.loads import Load, overlap_ratio, timeline_load, trace_loads
from profiles.traces import Trace, read_trace
from tests.profiles.recordings import MODEL, Recording, write_nsys, write_torch

Write = Callable[[Path, Recording], Path]
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


@pytest.fixture(params=[write_nsys, write_torch], ids=["nsys", "torch"])
def write(request: pytest.FixtureRequest) -> Write:
    return request.param  # type: ignore[no-any-return]


def layerwise(recording: Recording, *, at: float = 0.0, number: int = 5) -> Recording:
    """Loads end at 12, 21.5 and 36 ms, and the compute stream arrives at their gates at 4, 22 and 32 ms."""
    recording.step(number, at, at + 45)
    recording.kernel(at - 3, at - 2, at + 3)
    for layer, (queued, begin, end) in zip(LAYERS, ((1, 2, 12), (2, 11, 21.5), (3, 21.5, 36)), strict=True):
        recording.load(layer, at + queued, at + begin, at + end)
    for layer, (gate, begin, end) in zip(LAYERS, ((4, 12, 22), (5, 22, 32), (6, 36.25, 46)), strict=True):
        recording.mark("wait", layer, at + gate, at + gate + 0.2)
        recording.kernel(at + gate + 0.5, at + begin, at + end)
    return recording


def loads_of(path: Path, stream: int | None = None) -> list[Load]:
    trace = read_trace(path)
    assert isinstance(trace, Trace)
    return trace_loads(trace, stream)


def ms(values: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value * 1e3, 3) for value in values]


def stalls(load: Load) -> list[float | None]:
    return ms([layer.stall for layer in load.layers])


def computes(load: Load) -> list[float | None]:
    return ms([layer.compute for layer in load.layers])


def test_a_layerwise_load_has_known_answers(tmp_path: Path, write: Write) -> None:
    (load,) = loads_of(write(tmp_path / "trace", layerwise(Recording())))
    assert load.step == 5
    assert [layer.label for layer in load.layers] == list(LAYERS)
    assert ms([layer.end - layer.begin for layer in load.layers]) == [10.0, 10.5, 14.5]
    assert [layer.nbytes for layer in load.layers] == [1_000_000] * 3
    # 4 to 12; none; 32 to 36, not to 36.25.
    assert stalls(load) == [8.0, 0.0, 4.0]
    assert computes(load) == [10.0, 10.0, 9.75]
    assert overlap_ratio([load]) == pytest.approx(1 - 12 / 34)


def test_a_gap_before_the_host_arrives_at_the_gate_is_no_stall(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.marks = [
        mark if mark[:2] != ("wait", LAYERS[0]) else (*mark[:4], 4.4, 4.45, mark[6]) for mark in recording.marks
    ]
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [7.6, 0.0, 4.0]


def test_gates_passed_all_at_once_count_no_moment_twice(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    for layer, (queued, begin, end) in zip(LAYERS, ((1, 2, 12), (2, 11, 21.5), (3, 21.5, 36)), strict=True):
        recording.load(layer, queued, begin, end)
    recording.mark("wait", f"{LAYERS[0]}..{LAYERS[2]}", 4, 4.2)
    graph = [("KERNEL", MODEL, begin, begin + 3.0, 0) for begin in (37.0, 40.0, 43.0)]
    recording.call(5, *graph)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [8.0, 9.5, 14.5]
    assert computes(load) == [0.0, 0.0, 9.0]


def test_a_graph_is_computed_where_it_was_launched(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.load(LAYERS[0], 1, 2, 12)
    recording.load(LAYERS[1], 2, 12, 20)
    for layer, at, begin in ((LAYERS[0], 4, 12), (LAYERS[1], 5, 20)):
        recording.mark("wait", layer, at, at + 0.1)
        recording.call(at + 0.5, *(("KERNEL", MODEL, begin + shift, begin + shift + 1.0, 0) for shift in (0, 1, 2)))
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [8.0, 5.0]
    assert computes(load) == [3.0, 3.0]


def test_a_load_that_is_one_graph_is_found_by_its_launch(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.mark("load", f"{LAYERS[0]}..{LAYERS[2]}", 1, 1.5, path="graph", nbytes=6_000_000)
    recording.call(1.2, ("MEMCPY", 20, 2, 8, 4_000_000), ("KERNEL", 20, 8, 9, 0), ("MEMCPY", 20, 9, 10, 2_000_000))
    recording.mark("wait", LAYERS[0], 3, 3.1)
    recording.kernel(3.5, 10.5, 20)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert [(layer.label, layer.nbytes) for layer in load.layers] == [(f"{LAYERS[0]}..{LAYERS[2]}", 6_000_000)]
    assert ms([load.seconds]) == [8.0]
    assert stalls(load) == [7.0]


def test_a_load_of_many_layers_can_have_a_gate_for_each(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.mark("load", f"{LAYERS[0]}..{LAYERS[2]}", 1, 1.5, path="graph", nbytes=3)
    recording.call(1.2, *(("KERNEL", 20, begin, end, 0) for begin, end in ((2, 10), (10, 20), (20, 30))))
    # The name of the middle layer is not part of the group's.
    for layer, gate, begin, end in zip(LAYERS, (4, 5, 6), (10, 20, 30), (13, 29, 40), strict=True):
        recording.mark("wait", layer, gate, gate + 0.1)
        recording.kernel(gate + 0.5, begin, end)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    # 4 to 10, 13 to 20, 29 to 30.
    assert stalls(load) == [14.0]
    assert computes(load) == [22.0]


def test_a_gate_of_nothing_that_was_loaded_is_left_out(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.load(LAYERS[1], 1, 2, 12)
    for layer, gate, begin in ((LAYERS[0], 4, 5), (LAYERS[1], 6, 13)):
        recording.mark("wait", layer, gate, gate + 0.1)
        recording.kernel(gate + 0.5, begin, begin + 2)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [5.0]


def test_graphs_traced_as_a_whole_are_work_too(tmp_path: Path) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.load(LAYERS[0], 1, 2, 12)
    recording.mark("wait", LAYERS[0], 4, 4.1)
    recording.call(4.5, ("GRAPH_TRACE", MODEL, 12, 30, 0))
    (load,) = loads_of(write_nsys(tmp_path / "trace", recording))
    assert stalls(load) == [8.0]
    assert computes(load) == [18.0]


def test_the_first_gate_inside_a_group_is_the_group_s(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 60)
    recording.load(f"{LAYERS[0]}..{LAYERS[1]}", 1, 2, 12)
    recording.load(LAYERS[2], 2, 12, 30)
    for layer, at, begin in zip(LAYERS, (4, 5, 6), (12, 14, 30), strict=True):
        recording.mark("wait", layer, at, at + 0.1)
        recording.kernel(at + 0.5, begin, begin + 2)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [8.0, 14.0]
    assert computes(load) == [4.0, 2.0]


def test_steps_are_told_apart(tmp_path: Path, write: Write) -> None:
    recording = layerwise(layerwise(Recording(), number=5), at=50, number=6)
    recording.mark("load", LAYERS[0], 200, 201)
    recording.call(200.5, ("MEMCPY", 20, 201, 202, 9))
    loads = loads_of(write(tmp_path / "trace", recording))
    assert [load.step for load in loads] == [5, 6]
    assert [stalls(load) for load in loads] == [[8.0, 0.0, 4.0]] * 2
    assert overlap_ratio(loads) == pytest.approx(1 - 12 / 34)


def test_a_second_load_of_a_layer_in_a_step_is_parked_and_has_no_gate(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.load(LAYERS[0], 8, 40, 44)
    gated, parked = loads_of(write(tmp_path / "trace", recording))
    assert gated.gated and not parked.gated
    assert stalls(parked) == [None]
    assert overlap_ratio([gated, parked]) == overlap_ratio([gated])
    assert overlap_ratio([parked]) is None


def test_a_parked_load_in_other_groups_is_told_apart(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.load(f"{LAYERS[0]}..{LAYERS[1]}", 8, 40, 44)
    recording.load(LAYERS[2], 9, 44, 46)
    gated, parked = loads_of(write(tmp_path / "trace", recording))
    assert stalls(gated) == [8.0, 0.0, 4.0]
    assert [layer.label for layer in parked.layers] == [f"{LAYERS[0]}..{LAYERS[1]}", LAYERS[2]]
    assert stalls(parked) == [None, None]


def test_saves_are_no_loads_and_their_stream_is_not_the_compute_stream(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.mark("save", LAYERS[0], 7, 7.5)
    recording.call(7.2, ("KERNEL", 22, 10, 900, 0))
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [8.0, 0.0, 4.0]


def test_the_compute_stream_can_be_named(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.kernel(7, 10, 400, stream=13)
    path = write(tmp_path / "trace", recording)
    assert stalls(loads_of(path)[0]) != [8.0, 0.0, 4.0]
    assert stalls(loads_of(path, stream=MODEL)[0]) == [8.0, 0.0, 4.0]
    with pytest.raises(ConfigError, match=r"--stream 99: .* it has \[7, 13\]"):
        loads_of(path, stream=99)


def test_work_before_the_first_step_does_not_choose_the_compute_stream(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.kernel(-100, -90, -10, stream=13)
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert stalls(load) == [8.0, 0.0, 4.0]


def test_ranks_with_the_same_correlation_numbers_do_not_mix(tmp_path: Path) -> None:
    other = Recording(process=42)
    other.step(5, 0, 45)
    other.load(LAYERS[0], 1, 30, 40)
    other.mark("wait", LAYERS[0], 4, 4.1)
    other.kernel(4.5, 41, 44)
    first, second = loads_of(write_nsys(tmp_path / "trace", layerwise(Recording()), other))
    assert stalls(first) == [8.0, 0.0, 4.0]
    assert stalls(second) == [36.0]


def test_ranges_of_other_domains_are_not_ours(tmp_path: Path, write: Write) -> None:
    recording = layerwise(Recording())
    recording.mark("load", "theirs", 7, 8, domain="somebody")
    recording.call(7.5, ("KERNEL", 30, 10, 11, 0))
    (load,) = loads_of(write(tmp_path / "trace", recording))
    assert [layer.label for layer in load.layers] == list(LAYERS)


def test_a_step_that_never_ended_reaches_to_the_end(tmp_path: Path) -> None:
    recording = layerwise(Recording())
    recording.marks[0] = (*recording.marks[0][:5], None, recording.marks[0][6])
    (load,) = loads_of(write_nsys(tmp_path / "trace", recording))
    assert computes(load) == [10.0, 10.0, 9.75]


def test_bytes_come_from_the_copies_where_a_range_has_no_payload(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "trace", layerwise(Recording()))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE NVTX_EVENTS SET int64Value = NULL")
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET bytes = 77")
    db.close()
    (load,) = loads_of(path)
    assert [layer.nbytes for layer in load.layers] == [77] * 3
    assert load.step is None


def test_without_copies_only_kernels_tell_when_a_load_ran(tmp_path: Path) -> None:
    (load,) = loads_of(write_nsys(tmp_path / "trace", layerwise(Recording()), without=("MEMCPY",)))
    assert ms([layer.end - layer.begin for layer in load.layers]) == [0.5] * 3


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("NVTX_EVENTS", r"no table NVTX_EVENTS: record with `nsys profile --trace=cuda,nvtx`"),
        ("RUNTIME", r"no table CUPTI_ACTIVITY_KIND_RUNTIME"),
    ],
)
def test_a_missing_table_is_named_with_the_option_that_records_it(tmp_path: Path, table: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_trace(write_nsys(tmp_path / "trace", layerwise(Recording()), without=(table,)))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "trace", layerwise(Recording()))
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId")
    db.close()
    with pytest.raises(ConfigError, match=r"KERNEL has no column streamId"):
        read_trace(path)


def test_a_recording_without_our_ranges_is_refused(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.mark("load", "x", 1, 2, domain="somebody", path="")
    recording.kernel(1, 2, 3)
    with pytest.raises(ConfigError, match="no range of layerstream"):
        read_trace(write(tmp_path / "trace", recording))


def test_a_recording_without_a_gpu_is_refused(tmp_path: Path) -> None:
    recording = Recording()
    recording.step(1, 0, 1)
    with pytest.raises(ConfigError, match="no work of a GPU"):
        read_trace(write_torch(tmp_path / "trace", recording))


def test_steps_without_loads_are_refused(tmp_path: Path, write: Write) -> None:
    recording = Recording()
    recording.step(1, 0, 10)
    recording.kernel(1, 2, 3)
    with pytest.raises(ConfigError, match="no step of the recording has a load"):
        loads_of(write(tmp_path / "trace", recording))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"nonsense", b'{"traceEvents": [7]}', b"SQLite format 3\0junk"])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ConfigError, match=r"other is no SQLite export of Nsight Systems"):
        read_trace(tmp_path / "other")


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="no range of layerstream"):
        read_trace(tmp_path / "empty")


def timeline() -> Timeline:
    return Timeline(
        step=3,
        requests=("a",),
        blocks=2,
        nbytes=11,
        layers=tuple(
            LayerTimes(
                layer=layer, load_begin=begin, load_end=begin + 1, gate_begin=begin, gate_end=begin + 0.5, compute_end=9
            )
            for layer, begin in zip(LAYERS[:2], (0.0, 2.0), strict=True)
        ),
    )


def test_a_timeline_is_taken_as_it_is(tmp_path: Path) -> None:
    read = read_trace(timeline().write(tmp_path, 0))
    assert read == timeline()
    load = timeline_load(timeline())
    assert [layer.nbytes for layer in load.layers] == [6, 5]
    assert [layer.stall for layer in load.layers] == [0.5, 0.5]
    assert [layer.compute for layer in load.layers] == [8.5, 6.5]
    assert overlap_ratio([load]) == pytest.approx(timeline().overlap_ratio)


def test_a_gzipped_trace_is_read(tmp_path: Path) -> None:
    plain = write_torch(tmp_path / "trace.json", layerwise(Recording()))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert loads_of(packed) == loads_of(plain)


def test_the_report_shows_means_and_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_nsys(tmp_path / "trace", layerwise(layerwise(Recording()), at=50, number=6))
    assert overlap.main([str(path)]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert [LAYERS[0], "2", "10.000", "0.10", "10.000", "8.000"] in cells
    assert "2 load(s), gated: 6.0 MB at 0.09 GB/s" in printed
    assert "exposed stall 24.000 ms, overlap ratio 0.647" in printed


def test_the_report_counts_loads_without_gates_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = layerwise(Recording())
    recording.load(LAYERS[0], 8, 40, 44)
    assert overlap.main([str(write_torch(tmp_path / "trace", recording))]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines == [
        "1 load(s), gated: 3.0 MB at 0.09 GB/s",
        "1 load(s), not gated layer by layer, not in the ratio: 1.0 MB at 0.25 GB/s",
        "exposed stall 12.000 ms, overlap ratio 0.647",
    ]


def test_one_step_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_nsys(tmp_path / "trace", layerwise(layerwise(Recording()), at=50, number=6))
    assert overlap.main([str(path), "--step", "6"]) == 0
    assert "1 load(s), gated: 3.0 MB" in capsys.readouterr().out
    assert overlap.main([str(path), "--step", "9"]) == 2
    assert "--step 9: no load was recorded in that step; there are [5, 6]" in capsys.readouterr().err


def test_the_report_needs_no_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert overlap.main([str(write_nsys(tmp_path / "trace", layerwise(Recording())))]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1] == [
        LAYERS[0],
        "1",
        "10.000",
        "0.10",
        "10.000",
        "8.000",
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "trace", layerwise(Recording()))
    assert overlap.main([str(path), "--png", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_it_runs_as_a_module_and_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(json.dumps({"a": 1}))
    done = subprocess.run(
        [sys.executable, "-m", "profiles.overlap", str(tmp_path / "bad")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stderr.startswith("overlap: ") and done.stderr.count("\n") == 1
