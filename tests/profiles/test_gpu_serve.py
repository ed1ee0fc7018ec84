from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from layerstream.cli.results import Results, Row, read_results
from layerstream.hooks.vllm.local_engine import Answer, LocalEngine
from layerstream.hooks.vllm.register import NAME
from layerstream.jobs import Report
from layerstream.metrics import TransferStats
from profiles.gpu_serve import __main__ as command
from profiles.gpu_serve import session as session_module
from profiles.gpu_serve.models import LLAMA8B, SMOLLM2, TINY, Model, NotRun, find_model, wanted, write_llama8b
from profiles.gpu_serve.observations import CASES, HALF, LAST, WHOLE, Observation, parse_lines
from profiles.gpu_serve.plan import (
    GRAPH_MODE,
    IN_GRAPH,
    LAYERSTREAM,
    OFFLOADING,
    PLAIN,
    SYSTEMS,
    Settings,
    SystemSpec,
    parse_arguments,
    plan_systems,
)
from profiles.gpu_serve.probe import Probe
from profiles.gpu_serve.runner import Ran, run_system
from profiles.gpu_serve.session import Session
from profiles.gpu_serve.table import Table

BLOCK = 16


def settings(arguments: str = "", *, cuda: bool = True) -> Settings:
    return parse_arguments(arguments.split(), cuda=cuda)[0]


def model(**changes: Any) -> Model:
    shape = {"dummy": False, "positions": 8192, "vocabulary": 512, "kv_elements": 4096}
    return Model(**{"name": "m", "folder": Path("/m"), **shape, **changes})


def planned(arguments: str = "", *, cuda: bool = True, **shape: Any) -> dict[str, SystemSpec | NotRun]:
    return {system.name: system for system in plan_systems(settings(arguments, cuda=cuda), model(**shape), cuda=cuda)}


def engine_of(system: SystemSpec | NotRun) -> SystemSpec:
    assert isinstance(system, SystemSpec)
    return system


class TestModels:
    def test_the_config_is_that_of_an_8b_llama(self, tmp_path: Path) -> None:
        from transformers import LlamaConfig

        config = LlamaConfig.from_pretrained(write_llama8b(tmp_path / "new"))
        h, ffn, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        kv = config.num_key_value_heads * config.head_dim
        weights = 2 * config.vocab_size * h + layers * (2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h) + h
        assert weights == 8_030_261_248
        assert config.rope_parameters["rope_theta"] == 500000.0
        assert not config.tie_word_embeddings

    def test_a_gpu_serves_it_and_a_cpu_says_why_not(self, tmp_path: Path) -> None:
        found = find_model(LLAMA8B, tmp_path, cuda=True, say=print)
        assert isinstance(found, Model)
        assert found.dummy
        assert 2 * found.kv_elements == 128 * 1024
        refused = find_model(LLAMA8B, tmp_path, cuda=False, say=print)
        assert isinstance(refused, NotRun)
        assert "GPU" in refused.reason

    def test_the_tiny_model_is_read(self, tmp_path: Path) -> None:
        found = find_model(TINY, tmp_path, cuda=False, say=print)
        assert isinstance(found, Model)
        assert (found.kv_elements, found.vocabulary, found.dummy) == (2 * 8 * 4 * 64, 512, False)

    def test_the_machine_decides_what_is_served(self) -> None:
        assert wanted(None, cuda=True, has_smollm2=True) == (LLAMA8B, SMOLLM2)
        assert wanted(None, cuda=True, has_smollm2=False) == (LLAMA8B, TINY)
        assert wanted(None, cuda=False, has_smollm2=True) == (SMOLLM2,)
        assert wanted(SMOLLM2, cuda=True, has_smollm2=False) == (SMOLLM2,)


class TestPlan:
    def test_systems_differ_in_their_connector_alone(self) -> None:
        systems = planned("--in-graph flags --backend TRITON_ATTN")
        assert list(systems) == [*SYSTEMS, IN_GRAPH]
        specs = [json.loads(engine_of(system).to_json()) for system in systems.values()]
        own = {"name", "connector", "options"}
        assert len({json.dumps({k: v for k, v in spec.items() if k not in own}) for spec in specs}) == 1
        assert [spec["connector"] for spec in specs] == [None, NAME, "OffloadingConnector", NAME]
        ours, theirs = specs[1]["options"], specs[2]["options"]
        assert theirs["cpu_bytes_to_use"] == int(ours["host_gib"] * 2**30)
        assert specs[3]["options"] == {**ours, "in_graph_waits": "flags"}
        assert (ours["recompute"], ours["load_mode"]) == ("never", "layerwise"), (
            "rates must not decide what is measured"
        )

    def test_the_options_of_a_gpu_reach_the_engine(self) -> None:
        flags = "--backend FLASH_ATTN --gpu-memory-utilization 0.5 --gpu-blocks 99 --batched-tokens 2048"
        arguments = engine_of(planned(flags, dummy=True)[LAYERSTREAM]).arguments
        assert arguments == {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "num_gpu_blocks_override": 99,
            "max_num_batched_tokens": 2048,
            "compilation_config": {"cudagraph_mode": GRAPH_MODE},
            "gpu_memory_utilization": 0.5,
            "attention_backend": "FLASH_ATTN",
        }

    def test_cache_and_pool_hold_three_prompts(self) -> None:
        spec = engine_of(planned("--tokens 4096", kv_elements=65536)[LAYERSTREAM])
        assert spec.arguments["num_gpu_blocks_override"] * 16 == 3 * 4096
        assert spec.options["host_gib"] == 3 * 4096 * 65536 * 2 / 2**30

    def test_a_cpu_runs_neither_vllms_offloading_nor_graphs(self) -> None:
        systems = planned("--in-graph events", cuda=False)
        assert isinstance(systems[OFFLOADING], NotRun)
        assert isinstance(systems[IN_GRAPH], NotRun)
        assert engine_of(systems[LAYERSTREAM]).arguments == {"skip_tokenizer_init": True}

    def test_prompts_that_are_too_long_are_left_out(self) -> None:
        assert engine_of(planned("--tokens 4096,32768")[PLAIN]).lengths == (4096,)
        assert {type(system) for system in planned("--tokens 32768").values()} == {NotRun}

    def test_a_spec_survives_the_command_line(self) -> None:
        spec = engine_of(planned()[LAYERSTREAM])
        assert SystemSpec.from_json(spec.to_json()) == spec

    @pytest.mark.parametrize(
        "flags", ["--tokens 0", "--rounds x", "--budget-s inf", "--systems mine", "--only gpt", "--decode-tokens 1"]
    )
    def test_wrong_options_are_refused(self, flags: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            settings(flags)

    def test_a_backend_needs_a_gpu(self) -> None:
        with pytest.raises(SystemExit, match="2"):
            settings("--backend TRITON_ATTN", cuda=False)


class FakeEngine:
    """Serves at once; a connector's cache holds what was served, and logprobs are a function of the prompt."""

    block_tokens = BLOCK

    def __init__(self, *, connector: bool = True) -> None:
        self.llm = self
        self.connector = connector
        self.local: set[tuple[int, ...]] = set()
        self.saved: set[tuple[int, ...]] = set()
        self.resets_refused = 0
        self.loads = 0
        self.damaged = self.blind = False
        self.log: list[tuple[int, int]] = []

    def serve(self, prompt: Sequence[int], *, tokens: int = 1, logprobs: int | None = None) -> Answer:
        blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
        held = [block in self.local for block in blocks]
        loaded = not all(held) and any(block in self.saved for block in blocks)
        cached = BLOCK * sum(block in (self.local | self.saved) for block in blocks)
        self.loads += loaded
        self.local.update(blocks)
        if self.connector:
            self.saved.update(blocks)
        self.log.append((len(prompt), cached))
        seen = prompt[-1:] if self.blind else prompt
        value = random.Random(str(list(seen))).random() + (self.damaged and loaded)
        return Answer(
            seconds=0.5,
            cached_tokens=cached,
            token_ids=(7,) * tokens,
            logprobs=({7: value},) * tokens if logprobs else (),
            decode_seconds=float(tokens - 1) if tokens > 1 else None,
        )

    def reset_prefix_cache(self) -> bool:
        self.resets_refused -= 1
        if self.resets_refused >= 0:
            return False
        self.local.clear()
        return True

    def collective_rpc(self, method: str) -> list[dict[str, float]]:
        assert method == "probe_take"
        loads, self.loads = self.loads, 0
        return [{"load_blocks": loads, "load_seconds": 0.25 * loads}]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(session_module, "PATIENCE_S", 0.1)


def session(engine: FakeEngine, system: str = LAYERSTREAM, *, tokens: int = 64) -> tuple[Session, list[Observation]]:
    seen: list[Observation] = []
    spec = engine_of(planned(f"--tokens {tokens} --rounds 3 --decode-prompt 20 --decode-tokens 5")[system])
    return Session(cast(LocalEngine, engine), spec, seen.append), seen


@pytest.mark.usefixtures("quick")
class TestSession:
    def test_everything_asked_for_is_observed(self) -> None:
        engine = FakeEngine()
        measured, seen = session(engine)
        measured.measure()
        counts = {(o.kind, o.case): 0 for o in seen}
        for each in seen:
            counts[each.kind, each.case] += 1
        expected = {(kind, case): 3 for kind in ("hit", "own", "moved") for case in CASES}
        expected |= {(kind, case): 2 for kind in ("exact", "sensitive") for case in (WHOLE, LAST)}
        assert counts == expected | {("cold", ""): 3, ("decode", ""): 3}
        assert {o.value for o in seen if o.kind == "exact"} == {1.0}
        assert {o.value for o in seen if o.kind == "decode"} == {1.0}
        hits = {o.case: o.detail["cached_tokens"] for o in seen if o.kind == "hit"}
        assert hits == {WHOLE: 48, LAST: 48, HALF: 32}
        assert {served for served in engine.log if served[1]} == {(64, 48), (49, 48), (64, 32)}

    def test_without_a_connector_nothing_is_loaded(self) -> None:
        measured, seen = session(FakeEngine(connector=False), PLAIN)
        measured.measure()
        assert {o.kind for o in seen} == {"cold", "decode", "own"}
        assert [o.detail["cached_tokens"] for o in seen if o.kind == "own"] == [48] * 3

    def test_every_system_serves_the_same_prompts(self) -> None:
        ours, theirs = FakeEngine(), FakeEngine(connector=False)
        session(ours)[0].cold(64)
        session(theirs, PLAIN)[0].cold(64)
        assert ours.local == theirs.local != set()

    def test_damaged_loads_are_seen(self) -> None:
        engine = FakeEngine()
        engine.damaged = True
        measured, seen = session(engine)
        measured.exact(WHOLE, 64)
        assert [o.value for o in seen if o.kind == "exact"] == [0.0, 0.0]

    def test_a_model_whose_logprobs_do_not_tell_is_seen(self) -> None:
        engine = FakeEngine()
        engine.blind = True
        measured, seen = session(engine)
        measured.exact(WHOLE, 64)
        assert [o.value for o in seen if o.kind == "sensitive"] == [0.0, 0.0]

    def test_a_part_that_fails_says_so_and_the_rest_is_measured(self) -> None:
        engine = FakeEngine(connector=False)
        measured, seen = session(engine)
        measured.measure()
        failed = {(o.detail["part"], o.case) for o in seen if o.kind == "failed"}
        assert failed == {("hit", case) for case in CASES} | {("exact", WHOLE), ("exact", LAST)}
        assert all("held 0 tokens instead of" in o.detail["reason"] for o in seen if o.kind == "failed")
        assert {o.kind for o in seen} == {"failed", "cold", "decode"}

    def test_a_cache_that_is_in_use_is_asked_again(self) -> None:
        engine = FakeEngine()
        engine.resets_refused = 2
        session(engine)[0].forget()
        assert engine.log == [(4, 0), (4, 0)]
        engine.resets_refused = 10**9
        with pytest.raises(RuntimeError, match="could not be cleared"):
            session(engine)[0].forget()


class TestProbe:
    def test_weights_are_filled_by_their_shape(self) -> None:
        probe = Probe()
        matrix, norm = torch.nn.Linear(256, 512, bias=False), torch.nn.RMSNorm(512)
        norm.weight.data.zero_()
        probe.get_model = lambda: torch.nn.Sequential(matrix, norm)  # type: ignore[attr-defined]
        probe.probe_fill(0)
        before = matrix.weight.clone()
        assert before.std().item() == pytest.approx(1 / 16, rel=0.02)
        assert torch.equal(norm.weight, torch.ones(512))
        probe.probe_fill(0)
        assert torch.equal(matrix.weight, before)

    def test_reports_are_added_up_and_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        metas: list[Any] = [
            None,
            *(SimpleNamespace(report=Report(stats=TransferStats(load_blocks=n, stall_seconds=0.5))) for n in (1, 2)),
        ]
        waiting = list(metas)
        connector = SimpleNamespace(build_connector_worker_meta=lambda: waiting.pop(0))
        transfers = SimpleNamespace(get_kv_transfer_group=lambda: connector)
        monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", transfers)
        probe = Probe()
        probe.probe_watch()
        assert [connector.build_connector_worker_meta() for _ in metas] == metas
        taken = probe.probe_take()
        assert (taken["load_blocks"], taken["stall_seconds"]) == (3, 1.0)
        assert probe.probe_take()["load_blocks"] == 0

    def test_it_says_what_graphs_the_runner_settled_on(self) -> None:
        probe = Probe()
        mode = SimpleNamespace(name=GRAPH_MODE)
        probe.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        probe.device = torch.device("cpu")
        assert probe.probe_engine() == {"graphs": GRAPH_MODE, "device": "cpu"}


SCRIPT = """
import sys, time
from pathlib import Path
from profiles.gpu_serve.observations import Observation
file = Path(sys.argv[1])
Observation(kind="cold", tokens=64, value=0.5).append(file)
{}
Observation(kind="end").append(file)
"""


def run_script(body: str, folder: Path, *, budget_s: float = 60.0) -> tuple[Ran, list[str]]:
    file, said = folder / "fake.jsonl", list[str]()
    command = [sys.executable, "-c", SCRIPT.format(body), str(file)]
    return run_system(command, observations=file, budget_s=budget_s, say=said.append), said


class TestRunner:
    def test_a_system_that_ends_well_has_no_problem(self, tmp_path: Path) -> None:
        ran, said = run_script("", tmp_path)
        assert ran.problem == ""
        assert [seen.kind for seen in ran.observations] == ["cold", "end"]
        assert said == ["cold 64 tokens 500.00 ms", "end"]

    def test_the_budget_ends_it_with_all_it_started_and_keeps_what_it_told(self, tmp_path: Path) -> None:
        body = (
            "import subprocess\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
            "Observation(kind='engine', detail={'pid': child.pid}).append(file)\n"
            "time.sleep(300)"
        )
        ran, said = run_script(body, tmp_path, budget_s=6.0)
        assert "cut off after 6 s" in ran.problem
        assert said[-1] == ran.problem
        assert [seen.kind for seen in ran.observations] == ["cold", "engine"]
        assert not _runs(ran.observations[1].detail["pid"])

    @pytest.mark.parametrize("body", ["raise RuntimeError('no memory')", "print('no memory'); sys.exit()"])
    def test_a_system_that_fails_says_how(self, tmp_path: Path, body: str) -> None:
        ran, _ = run_script(body, tmp_path)
        assert "no memory" in ran.problem
        assert len(ran.observations) == 1

    def test_a_line_that_is_being_written_is_left_for_later(self, tmp_path: Path) -> None:
        ran, _ = run_script("file.open('a').write('{\"kind\": \"co'); sys.exit(1)", tmp_path)
        assert [seen.kind for seen in ran.observations] == ["cold"]

    def test_other_lines_are_refused(self) -> None:
        with pytest.raises(ValueError, match="is no observation"):
            parse_lines(['{"sort": 1}'])


def _runs(pid: int) -> bool:
    # A zombie that nobody has reaped yet has ended all the same.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    os.kill(pid, 9)
    return True


def observed(kind: Any, case: Any, values: Iterable[float], tokens: int = 64, **detail: Any) -> list[Observation]:
    return [
        Observation(kind=kind, case=case, tokens=tokens, round=number, value=value, detail=detail)
        for number, value in enumerate(values)
    ]


def layerstream_run(hit: float = 1.0, step: float = 1.0, load: float = 0.5, stall: float = 0.0) -> list[Observation]:
    moved: dict[str, Any] = {
        "load_seconds": load,
        "gated_load_seconds": load,
        "stall_seconds": stall,
        "load_bytes": 10**9,
    }
    seen = [Observation(kind="engine", detail={"graphs": GRAPH_MODE})]
    seen += observed("cold", "", [2.0] * 6) + observed("decode", "", [step] * 6, tokens=32)
    for case in CASES:
        seen += observed("hit", case, [hit] * 6, cached_tokens=48) + observed("own", case, [1.0] * 6, cached_tokens=48)
        seen += observed("moved", case, [load] * 6, **moved)
        seen += observed("exact", case, [1.0] * 2) + observed("sensitive", case, [1.0] * 2)
    return seen


PLAIN_RUN = (
    *observed("own", WHOLE, [0.8] * 6, cached_tokens=48),
    *observed("cold", "", [2.0] * 6),
    *observed("decode", "", [1.0] * 6, tokens=32),
)
OFFLOADING_RUN = tuple(
    seen
    for case in CASES
    for kind, value in (("hit", 1.5), ("own", 1.0))
    for seen in observed(kind, case, [value] * 6, cached_tokens=48)
)


def table(
    layerstream: Ran | None = None,
    *,
    cuda: bool = True,
    in_graph: str | None = None,
    in_graph_run: Ran | None = None,
    **found: Ran,
) -> dict[str, Row]:
    systems = {
        PLAIN: Ran(observations=PLAIN_RUN),
        LAYERSTREAM: layerstream or Ran(observations=tuple(layerstream_run())),
        OFFLOADING: Ran(observations=OFFLOADING_RUN),
        **({IN_GRAPH: in_graph_run} if in_graph_run else {}),
        **found,
    }
    rows = Table(
        model="m",
        lengths=(64,),
        positions=8192,
        rounds=6,
        decode_prompt=32,
        found=systems,
        cuda=cuda,
        in_graph=in_graph,
    ).rows()
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    return {row.name.partition(": ")[2]: row for row in rows}


HIT, OVERLAP = "TTFT of a hit / of vLLM's own", "overlap ratio of a hit"
COLD, PEER = "cold TTFT, saving / no connector", "TTFT of a hit, LayerStream / OffloadingConnector"
DECODE, EXACT = "decode time per token, connector / none", "logprobs of a hit bit-equal to vLLM's own (1: yes)"
GRAPHS = f"{GRAPH_MODE} kept with the connector (1: yes)"


class TestTable:
    def test_a_good_run_meets_every_target(self) -> None:
        rows = table()
        assert {row.verdict() for row in rows.values()} == {"met", "-"}
        assert [rows[name].wanted() for name in (HIT, OVERLAP, COLD, PEER, DECODE, EXACT, GRAPHS)] == [
            "<= 1.03",
            ">= 0.95",
            "<= 1.03",
            "<= 1",
            "<= 1.01",
            "= 1",
            "= 1",
        ]
        assert rows["LayerStream's hit"].measured() == "1000.00 ms"
        assert rows[PEER].interval().median == pytest.approx(1 / 1.5)

    def test_a_slow_run_misses(self) -> None:
        rows = table(Ran(observations=tuple(layerstream_run(hit=2.0, stall=0.4))))
        assert {rows[name].verdict() for name in (HIT, OVERLAP, PEER)} == {"missed"}
        assert rows[OVERLAP].samples == pytest.approx([0.2] * 6)

    def test_few_samples_are_unresolved_and_say_so(self) -> None:
        seen = [o for o in layerstream_run() if o.kind != "hit" or o.round < 3]
        row = table(Ran(observations=tuple(seen), problem="cut off after 9 s"))[HIT]
        assert row.verdict() == "unresolved, n = 3"
        assert "3 of 6 samples, as layerstream: cut off after 9 s" in row.note

    def test_pairs_are_of_the_same_prompt(self) -> None:
        plain = tuple(observed("cold", "", [1.0, 4.0, 2.0])[1:])
        row = table(plain=Ran(observations=plain))[COLD]
        assert row.pairs == [(2.0, 4.0), (2.0, 2.0)]

    def test_engines_that_ran_one_after_another_are_compared_in_what_both_do_alike(self) -> None:
        rows = table()
        assert all("vLLM's own hits have the ratio 1.250" in rows[name].note for name in (COLD, DECODE))
        assert "vLLM's own hits have the ratio 1.000" in rows[PEER].note
        control = rows["control: vLLM's own hit in LayerStream's engine / in an engine without connector"]
        assert control.measured() == "1.250"

    def test_a_load_that_compute_cannot_hide_has_no_target(self) -> None:
        row = table(Ran(observations=tuple(layerstream_run(step=0.1, stall=0.4))))[OVERLAP]
        assert row.verdict() == "-"
        assert "about 100.00 ms of compute are too short to hide it" in row.note

    def test_compute_is_what_a_hit_takes_beyond_one_token_and_a_step(self) -> None:
        seen = [o for o in layerstream_run(step=0.1, stall=0.4) if (o.kind, o.case) != ("own", HALF)]
        rows = table(Ran(observations=(*seen, *observed("own", HALF, [1.5] * 6))))
        assert rows["overlap ratio of a hit of half the prompt"].verdict() == "missed"
        assert rows[OVERLAP].verdict() == "-"

    def test_without_a_step_of_decoding_compute_is_unknown(self) -> None:
        seen = [o for o in layerstream_run() if o.kind != "decode"]
        row = table(Ran(observations=tuple(seen)))[OVERLAP]
        assert row.verdict() == "-"
        assert "unknown" in row.note

    def test_a_load_that_no_gate_waited_for_has_no_ratio(self) -> None:
        seen = [replace(o, detail={**o.detail, "gated_load_seconds": 0.0}) for o in layerstream_run()]
        assert "waited for its whole load" in table(Ran(observations=tuple(seen)))[OVERLAP].failure

    def test_equal_logprobs_that_prove_nothing_are_not_a_pass(self) -> None:
        seen = [o for o in layerstream_run() if o.kind != "sensitive"] + observed("sensitive", WHOLE, [1.0, 0.0])
        row = table(Ran(observations=tuple(seen)))[EXACT]
        assert row.verdict() == "not measured"
        assert "would prove nothing" in row.failure

    def test_one_wrong_logprob_is_missed(self) -> None:
        seen = [o for o in layerstream_run() if o.kind != "exact"] + observed("exact", WHOLE, [1.0, 0.0])
        assert table(Ran(observations=tuple(seen)))[EXACT].verdict() == "missed"

    def test_a_mode_of_graphs_that_was_changed_is_missed(self) -> None:
        seen = Observation(kind="engine", detail={"graphs": "PIECEWISE"})
        row = table(Ran(observations=(seen,)))[GRAPHS]
        assert row.verdict() == "missed"
        assert "PIECEWISE" in row.note

    def test_what_could_not_run_says_why(self) -> None:
        failed = Observation(kind="failed", case=WHOLE, tokens=64, detail={"part": "hit", "reason": "Oops: no hit"})
        seen = [o for o in layerstream_run() if (o.kind, o.case) not in {("hit", WHOLE), ("own", WHOLE)}]
        rows = table(
            Ran(observations=(*seen, failed)),
            cuda=False,
            in_graph="flags",
            plain=Ran(problem="ended with status 1"),
            offloading=Ran(problem="refused"),
        )
        assert rows[HIT].failure == "not run: layerstream: Oops: no hit"
        assert rows[COLD].failure == "not run: plain: ended with status 1"
        assert rows["OffloadingConnector's hit"].failure == "not run: offloading: refused"
        assert rows[GRAPHS].failure == "not run: a CPU engine has no CUDA graphs"
        assert rows["TTFT of a hit with one token left / without such waits"].failure == "not run: in-graph has not run"
        assert {row.verdict() for row in rows.values() if row.failure} == {"not measured"}

    def test_waits_in_graphs_are_compared_with_the_same_hit_without(self) -> None:
        rows = table(in_graph="flags", in_graph_run=Ran(observations=tuple(layerstream_run(hit=0.5))))
        assert rows["TTFT of a hit with one token left / without such waits"].pairs == [(0.5, 1.0)] * 6


def results() -> Results:
    return Results(started=datetime(2030, 1, 1, tzinfo=UTC), settings={}, machine={}, versions={}, commit="c")


def measure(
    folder: Path,
    run: Callable[[SystemSpec, Path], Ran],
    *,
    arguments: str = "--tokens 64,32768 --rounds 6 --decode-prompt 32",
    models: Sequence[Model | NotRun] = (model(),),
) -> tuple[bool, Results, list[str]]:
    found, said = results(), list[str]()
    whole = command.measure(
        settings(arguments), list(models), cuda=True, out=folder, results=found, run=run, say=said.append
    )
    return whole, found, said


RUNS = {PLAIN: PLAIN_RUN, LAYERSTREAM: tuple(layerstream_run()), OFFLOADING: OFFLOADING_RUN}


class TestRun:
    def test_results_are_written_after_each_system(self, tmp_path: Path) -> None:
        written: list[dict[str, str]] = []

        def run(spec: SystemSpec, _: Path) -> Ran:
            path = tmp_path / "gpu_serve.json"
            if path.exists():
                written.append({row.name: row.failure for row in read_results(path).rows})
            return Ran(observations=RUNS[spec.name])

        whole, _, _ = measure(tmp_path, run)
        assert whole
        name = "m, 64 tokens: cold TTFT, saving / no connector"
        assert [rows[name] for rows in written] == ["not run: layerstream has not run", ""]
        rows = {row.name: row for row in read_results(tmp_path / "gpu_serve.json").rows}
        assert rows[name].verdict() == "met"
        assert "8192" in rows["m, 32768 tokens"].failure
        text = (tmp_path / "gpu_serve.md").read_text()
        assert "not run: the model takes 8192 tokens" in text
        assert f"| {name} (" in text

    def test_one_failure_spoils_the_run_and_not_the_rest(self, tmp_path: Path) -> None:
        def run(spec: SystemSpec, _: Path) -> Ran:
            return Ran(problem="died") if spec.name == PLAIN else Ran(observations=RUNS[spec.name])

        whole, found, _ = measure(tmp_path, run)
        assert not whole
        verdicts = {row.name: row.verdict() for row in found.rows}
        assert verdicts["m, 64 tokens: TTFT of a hit / of vLLM's own"] == "met"
        assert verdicts["m, 64 tokens: cold TTFT, saving / no connector"] == "not measured"

    def test_an_unequal_logprob_spoils_the_run(self, tmp_path: Path) -> None:
        wrong = [o for o in layerstream_run() if o.kind != "exact"] + observed("exact", LAST, [1.0, 0.0])

        def run(spec: SystemSpec, _: Path) -> Ran:
            return Ran(observations=tuple(wrong) if spec.name == LAYERSTREAM else RUNS[spec.name])

        assert not measure(tmp_path, run)[0]

    def test_slow_is_no_failure(self, tmp_path: Path) -> None:
        def run(spec: SystemSpec, _: Path) -> Ran:
            slow = tuple(layerstream_run(hit=9.0))
            return Ran(observations=slow if spec.name == LAYERSTREAM else RUNS[spec.name])

        assert measure(tmp_path, run)[0]

    def test_models_that_cannot_run_keep_their_row(self, tmp_path: Path) -> None:
        models: list[Model | NotRun] = [NotRun(name="big", reason="too big"), model()]
        whole, found, said = measure(tmp_path, lambda spec, _: Ran(observations=RUNS[spec.name]), models=models)
        assert whole
        assert found.rows[0].failure == "not run: too big"
        assert len(found.rows) > 10
        assert said[0] == "big: not run: too big"

    def test_a_run_in_which_nothing_could_run_is_no_success(self, tmp_path: Path) -> None:
        whole, _, _ = measure(tmp_path, lambda *_: Ran(), models=[NotRun(name="big", reason="too big")])
        assert not whole
        assert [row.failure for row in read_results(tmp_path / "gpu_serve.json").rows] == ["not run: too big"]

    def test_without_vllm_it_says_so(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        assert command.main([]) == 3
        assert "vLLM is not installed" in capsys.readouterr().err
