from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from layerstream.cli import demo
from layerstream.cli.demo import run
from layerstream.cli.findings import logprob_distance
from layerstream.cli.prose import prompt_of
from layerstream.errors import ConfigError, LayerStreamError
from layerstream.hooks.vllm.local_engine import Answer
from layerstream.timeline import LayerTimes, Timeline

# A whole number of blocks, of which a hit may not cover the last.
PROMPT, HIT, BLOCK = 304, 288, 16


class FakeEngine:
    """vLLM and LayerStream by their rules: what is cached where, and what a hit gives."""

    instances: list[FakeEngine]
    block_tokens = BLOCK
    dtype = "bfloat16"
    local_hit = warm_hit = HIT
    warm_logprob = -0.5
    warm_token = 7
    writes_trace = True
    start_error: Exception | None = None
    serve_error: Exception | None = None

    def __init__(self, model: Path, *, max_model_len: int, max_num_seqs: int, options: dict[str, Any]) -> None:
        os.write(1, b"babble of the engine\n")
        os.write(2, b"more babble\n")
        if self.start_error is not None:
            raise self.start_error
        self.max_tokens, self.trace_dir = max_model_len, Path(options["trace_dir"])
        self.local, self.pool = False, False
        self.order: list[str] = []
        self.closed = 0
        self.left_traces = 0
        self.instances.append(self)

    def tokenize(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def serve(self, prompt: Sequence[int], *, tokens: int = 1, logprobs: int | None = None) -> Answer:
        assert len(prompt) + tokens <= self.max_tokens
        if self.serve_error is not None:
            raise self.serve_error
        kind = "local" if self.local else "warm" if self.pool else "cold"
        self.order.append(f"{kind} {tokens}")
        self.local = self.pool = True
        if kind == "warm" and self.writes_trace and self.warm_hit:
            self._write_trace(8_000_000 * tokens)
        token, logprob = (self.warm_token, self.warm_logprob) if kind == "warm" else (7, -0.5)
        return Answer(
            seconds={"cold": 4.0, "local": 0.1, "warm": 0.102}[kind],
            cached_tokens={"cold": 0, "local": self.local_hit, "warm": self.warm_hit}[kind],
            token_ids=(token,) * tokens,
            logprobs=({7: logprob, 9: -1.5 if kind == "cold" else -1.25},) * tokens if logprobs else (),
        )

    def _write_trace(self, nbytes: int) -> None:
        self.left_traces += len(list(self.trace_dir.iterdir()))
        step = len(self.order)
        layers = tuple(
            LayerTimes(
                layer=f"l{index}",
                load_begin=0.001 * index,
                load_end=0.001 * (index + 1),
                gate_begin=0.002 * index,
                gate_end=0.002 * index,
                compute_end=0.002 * (index + 1),
            )
            for index in range(4)
        )
        Timeline(step=step, requests=("r",), blocks=self.warm_hit // BLOCK, nbytes=nbytes, layers=layers).write(
            self.trace_dir, 0
        )

    def forget(self, *, connector: bool = False) -> None:
        self.local = False
        self.pool = self.pool and not connector

    def close(self) -> None:
        os.write(1, b"babble of the end\n")
        self.closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeEngine]:
    class Engine(FakeEngine):
        instances: list[FakeEngine] = []  # noqa: RUF012 - one list per test

    def prepare(progress: Callable[[str], None]) -> Path:
        progress("unpacking weights")
        return tmp_path

    monkeypatch.setattr(demo, "LocalEngine", Engine)
    monkeypatch.setattr(demo, "prepare_model", prepare)
    monkeypatch.setattr(demo, "SETTLE_S", 0.2)
    monkeypatch.setenv("COLUMNS", "80")
    return Engine


def demo_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], pairs: int = 2) -> tuple[int, str]:
    status = run(out=tmp_path / "out", prompt_tokens=PROMPT, pairs=pairs)
    shown = capfd.readouterr()
    assert shown.err == ""
    return status, shown.out


def test_everything_agrees(engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, shown = demo_run(tmp_path, capfd, pairs=6)
    assert status == 0
    rows = {cells[1].strip(): cells[2].strip() for line in shown.splitlines() if len(cells := line.split("│")) == 4}
    assert rows == {
        "cold: time to first token": "4,000 ms",
        "vLLM's own prefix hit, median": "100.0 ms",
        "through LayerStream, median": "102.0 ms",
        "LayerStream / vLLM's own hit": "1.02 (95 % interval 1.02 to 1.02, n = 6)",
        "speed-up over cold": "39.2 x",
        "hit tokens": "288",
        "bytes moved per hit": "8.0 MB",
        "load rate": "2.00 GB/s",
        "overlap ratio": "1.000",
        "exposed stall": "0.00 ms",
        "answer against vLLM's own hit": "same 16 tokens, logprobs bit-equal",
        "answer against cold": "same 16 tokens, logprobs within 0.25",
        "vLLM's own hit against cold": "same 16 tokens, logprobs within 0.25",
    }
    assert "FAILED" not in shown
    assert engine.instances[0].closed == 1
    # Or a load could be taken for the one before it.
    assert engine.instances[0].left_traces == 0


def test_what_is_timed_alternates_and_starts_from_a_true_cold(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo_run(tmp_path, capfd, pairs=3)
    assert engine.instances[0].order == [
        "cold 16", "local 16", "warm 16", "cold 1", "warm 1", "local 1", "local 1", "warm 1", "warm 1", "local 1",
    ]  # fmt: skip


def test_figures_of_loads_are_those_of_the_timed_hits(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The hit whose answer is compared reports 16 times the bytes.
    _, shown = demo_run(tmp_path, capfd, pairs=1)
    assert "1.02 (n = 1; an interval takes 6)" in shown
    assert re.search(r"bytes moved per hit +│ 8\.0 MB", shown)
    assert json.loads((tmp_path / "out" / "timeline.json").read_text("utf-8"))["otherData"]["nbytes"] == 8_000_000


def test_the_engine_s_output_goes_to_its_log_and_the_screen_comes_back(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, shown = demo_run(tmp_path, capfd)
    assert "babble" not in shown
    log = (tmp_path / "out" / "engine.log").read_text("utf-8")
    assert log == "babble of the engine\nmore babble\nbabble of the end\n"
    os.write(1, b"after")
    os.write(2, b"wards")
    assert capfd.readouterr() == ("after", "wards")


def test_timeline_is_written_as_chrome_trace_and_picture(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, shown = demo_run(tmp_path, capfd)
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text("utf-8"))
    assert sum(event["name"].startswith("load ") for event in trace["traceEvents"]) == 4
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "timeline.json" in shown and "timeline.png" in shown


def test_without_matplotlib_only_the_picture_is_missing(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> Path:
        raise ConfigError("pip install 'layerstream[plot]'")

    monkeypatch.setattr(demo, "draw_timeline", missing)
    status, shown = demo_run(tmp_path, capfd)
    assert status == 0
    assert "pip install 'layerstream[plot]'" in shown
    assert (tmp_path / "out" / "timeline.json").exists()


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ({"warm_hit": 272}, "the LayerStream hit covered 272 tokens instead of 288"),
        ({"warm_hit": 272}, "loads moved 272 tokens instead of 288"),
        ({"warm_hit": 0}, "the LayerStream hit covered 0 tokens instead of 288"),
        ({"local_hit": 0}, "vLLM's own prefix hit covered 0 tokens instead of 288"),
        ({"warm_logprob": -0.5000001}, "gave different logprobs"),
        ({"warm_token": 9}, "gave different tokens"),
    ],
)
def test_a_hit_that_is_not_whole_or_not_equal_fails(
    engine: type[FakeEngine],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    fault: dict[str, object],
    complaint: str,
) -> None:
    for name, value in fault.items():
        setattr(engine, name, value)
    status, shown = demo_run(tmp_path, capfd)
    assert status == 1
    assert "FAILED:" in shown and complaint in " ".join(shown.split())


def test_a_run_that_hits_where_it_should_be_cold_fails(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "forget", lambda self, *, connector=False: setattr(self, "local", False))
    status, shown = demo_run(tmp_path, capfd)
    assert status == 1
    assert "the cold run covered 288 tokens instead of 0" in shown


def test_a_load_without_a_timeline_fails(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.writes_trace = False
    status, shown = demo_run(tmp_path, capfd)
    assert status == 1
    assert "FAILED: LayerStreamError: waited 0.2 s for the load's timeline in vain" in shown
    assert engine.instances[0].closed == 1


@pytest.mark.parametrize("where", ["start_error", "serve_error"])
def test_an_engine_that_fails_is_explained_with_the_end_of_its_log(
    engine: type[FakeEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    setattr(engine, where, RuntimeError("Engine core initialization failed [see above]"))
    status, shown = demo_run(tmp_path, capfd)
    assert status == 1
    assert "FAILED: RuntimeError: Engine core initialization failed [see above]" in " ".join(shown.split())
    assert "more babble" in shown and "layerstream doctor" in shown and "engine.log" in shown
    assert "Traceback" not in shown
    assert [made.closed for made in engine.instances] == ([] if where == "start_error" else [1])


@pytest.mark.parametrize(("tokens", "pairs"), [(255, 5), (8001, 5), (4000, 0), (4000, 31)])
def test_arguments_out_of_range_are_refused_before_anything_starts(
    engine: type[FakeEngine], tmp_path: Path, tokens: int, pairs: int
) -> None:
    with pytest.raises(ConfigError, match="256 to 8000 tokens in 1 to 30 pairs"):
        run(out=tmp_path / "out", prompt_tokens=tokens, pairs=pairs)
    assert engine.instances == [] and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(engine: type[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="another folder with --out"):
        run(out=tmp_path / "file" / "out", prompt_tokens=PROMPT, pairs=1)


def test_a_missing_package_is_the_one_line_that_says_so(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(progress: Callable[[str], None]) -> Path:
        raise ConfigError("run `make setup`")

    monkeypatch.setattr(demo, "prepare_model", missing)
    with pytest.raises(LayerStreamError, match="make setup"):
        run(out=tmp_path / "out", prompt_tokens=PROMPT, pairs=1)


def test_the_prompt_is_varied_text_of_exactly_the_length_asked_for() -> None:
    def words(text: str) -> list[int]:
        return [zlib.crc32(word.encode()) for word in text.split()]

    prompt = prompt_of(words, tokens=4000)
    assert len(prompt) == 4000
    assert prompt == prompt_of(words, tokens=4000) and prompt[:1000] == prompt_of(words, tokens=1000)
    blocks = {tuple(prompt[first : first + 16]) for first in range(0, 4000, 16)}
    assert len(blocks) >= 240


def test_logprobs_are_compared_up_to_the_first_token_that_differs() -> None:
    def answer(*steps: tuple[int, dict[int, float]]) -> Answer:
        return Answer(
            seconds=1.0,
            cached_tokens=0,
            token_ids=tuple(token for token, _ in steps),
            logprobs=tuple(found for _, found in steps),
        )

    one = answer((1, {1: -0.5, 2: -1.0}), (1, {1: -0.5, 2: -0.75}), (3, {3: -9.0}))
    other = answer((1, {1: -0.5, 5: -3.0}), (2, {1: -0.75, 2: -0.5}), (3, {3: -1.0}))
    assert logprob_distance(one, other) == 0.25
    assert logprob_distance(one, one) == 0.0
