"""`layerstream demo`: one long prompt on the real vLLM engine, cold, on vLLM's own prefix hit, and through LayerStream.

Time to first token is the wall time of serving one token, as a caller sees it. What vLLM and its processes print goes
to `engine.log` in the output folder.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from layerstream.errors import ConfigError, LayerStreamError
from layerstream.model_store import MODEL_NAME, prepare_model
from layerstream.picture import draw_timeline
from layerstream.timeline import Timeline, read_timeline
from layerstream.trials import MAX_PAIRS, alternate, ratio_interval

PROMPT_TOKENS = range(256, 8001)
"""Prompts the demo serves: at least one whole block of any engine, and room for the answer in the model's 8,192."""
ANSWER_TOKENS = 16
"""Tokens of the requests whose output is compared."""
TOP_LOGPROBS = 5
SETTLE_S = 20.0
"""Longest wait for a report of the engine that is due within milliseconds."""
LOG_TAIL_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What serving one prompt gave."""

    seconds: float
    cached_tokens: int
    """Prompt tokens that were not computed."""
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """Per generated token: token id -> logprob of the likeliest ones; empty if not asked for."""


class VllmEngine:
    """A vLLM engine with the connector, as far as the demo needs one."""

    def __init__(self, model: Path, *, max_tokens: int, trace_dir: Path) -> None:
        """
        Args:
            model: the model's folder.
            max_tokens: prompt and answer of one request; a prompt is prefilled in one step.
            trace_dir: gets the timelines of loads.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
        _set_cpu_environment()
        import torch
        from vllm import LLM, SamplingParams

        self.dtype = _dtype()
        self._params = SamplingParams
        self._llm = LLM(
            model=str(model),
            dtype=self.dtype,
            # Compiling for a CPU takes a C++ compiler and a minute, and the same hooks run either way.
            enforce_eager=not torch.cuda.is_available(),
            max_model_len=max_tokens,
            max_num_batched_tokens=max_tokens,
            max_num_seqs=1,
            enable_prefix_caching=True,
            kv_transfer_config={
                "kv_connector": "LayerStreamConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"host_gib": 1, "trace_dir": str(trace_dir)},
            },
        )
        self.block_tokens: int = self._llm.llm_engine.vllm_config.cache_config.block_size

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._llm.get_tokenizer().encode(text))

    def serve(self, prompt: Sequence[int], *, tokens: int = 1, logprobs: int | None = None) -> Answer:
        """Generate exactly `tokens` tokens greedily."""
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs, detokenize=False)
        begun = time.perf_counter()
        answer = self._llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0]
        seconds = time.perf_counter() - begun
        output = answer.outputs[0]
        return Answer(
            seconds=seconds,
            cached_tokens=answer.num_cached_tokens or 0,
            token_ids=tuple(output.token_ids),
            logprobs=tuple({token: found.logprob for token, found in step.items()} for step in output.logprobs or ()),
        )

    def forget(self, *, host_pool: bool = False) -> None:
        """Clear vLLM's own prefix cache, and LayerStream's pool too if `host_pool`.

        Raises:
            LayerStreamError: blocks are still in use long after the last request.
        """
        _eventually(
            lambda: self._llm.reset_prefix_cache(reset_connector=host_pool) or None, "vLLM to clear its prefix cache"
        )

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=SETTLE_S)


def _dtype() -> str:
    """bfloat16, except on CPUs for which oneDNN has no bfloat16 matrix product (below AVX-512): eight times slower."""
    import torch

    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fast else "float32"


def _set_cpu_environment() -> None:
    """Settings of vLLM's CPU build, where the user has not made them; a GPU engine needs none."""
    import torch

    if torch.cuda.is_available() or not hasattr(os, "sched_getaffinity"):
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        # vLLM reserves one more core when a connector is configured, and on two cores that turns one compute core
        # into two, which then leave none to the copies. Bound to one, cold and warm compute on the same core and the
        # copies run on the others.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[0]))


def _eventually(attempt: Callable[[], Any], what: str) -> Any:
    """The first result of `attempt` that is not None."""
    deadline = time.monotonic() + SETTLE_S
    while (result := attempt()) is None:
        if time.monotonic() > deadline:
            raise LayerStreamError(f"waited {SETTLE_S:g} s for {what} in vain")
        time.sleep(0.01)
    return result


def prompt_of(engine: VllmEngine, *, tokens: int) -> list[int]:
    """A prompt of exactly `tokens` tokens of English sentences, the same each time."""
    draw = random.Random(0)
    pick = draw.choice
    text = ["From the log of a weather station."]
    while True:
        text += [
            f"{pick(_WHEN)} {pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHERE)}, {pick(_WHY)}; "
            f"the {pick(_GAUGE)} read {draw.randrange(10, 990) / 10} at {draw.randrange(24)}:{draw.randrange(10, 60)}."
            for _ in range(50)
        ]
        ids = engine.tokenize(" ".join(text))
        if len(ids) >= tokens:
            return ids[:tokens]


_WHEN = ("At dawn", "Before noon", "After the storm", "Late that night", "On the third day", "During the long watch")
_WHO = ("the keeper", "her brother", "a young surveyor", "the ferry's captain", "the new assistant", "old Marten")
_DID = ("repaired", "carried", "measured", "forgot", "painted", "buried", "sold", "described", "photographed")
_WHAT = ("the brass barometer", "two crates of lamp oil", "a map of the reef", "the broken mast", "a letter from home")
_WHERE = ("on the north pier", "below the lighthouse", "beside the frozen lake", "in the archive", "at the old mill")
_WHY = ("because the wind had turned", "although nobody had asked", "as the manual demands", "to settle a bet")
_GAUGE = ("thermometer", "rain gauge", "tide mark", "hygrometer", "wind vane", "clock in the hall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything the demo measured. Of the same prompt, and in pairs in which either kind of hit came first."""

    hit_tokens: int
    """What a hit must cover: every whole block before the prompt's last token, which is always computed."""
    block_tokens: int
    dtype: str
    cold: Answer
    pairs: tuple[tuple[Answer, Answer], ...]
    """(LayerStream hit, vLLM's own prefix hit), one token each."""
    long: tuple[Answer, Answer, Answer]
    """(LayerStream hit, vLLM's own prefix hit, cold), several tokens with logprobs."""
    timelines: tuple[Timeline, ...]
    """Of the LayerStream hits in `pairs`."""

    def problems(self) -> list[str]:
        """What is not as promised; empty if all is well."""
        warm, local, cold = self.long
        found = []
        for name, expected, answers in (
            ("the cold run", 0, (self.cold, cold)),
            ("vLLM's own prefix hit", self.hit_tokens, (local, *(theirs for _, theirs in self.pairs))),
            ("the LayerStream hit", self.hit_tokens, (warm, *(ours for ours, _ in self.pairs))),
        ):
            covered = {answer.cached_tokens for answer in answers} - {expected}
            if covered:
                found.append(f"{name} covered {_listed(covered)} tokens instead of {expected:,}")
        loaded = {timeline.blocks * self.block_tokens for timeline in self.timelines} - {self.hit_tokens}
        if loaded:
            found.append(f"loads moved {_listed(loaded)} tokens instead of {self.hit_tokens:,}")
        if warm.token_ids != local.token_ids:
            found.append("a LayerStream hit and vLLM's own prefix hit gave different tokens")
        if warm.logprobs != local.logprobs:
            found.append("a LayerStream hit and vLLM's own prefix hit gave different logprobs")
        return found


def _listed(counts: Iterable[int]) -> str:
    return " and ".join(f"{count:,}" for count in sorted(counts))


def logprob_distance(one: Answer, other: Answer) -> float:
    """Largest difference of logprobs that both name, as far as both continue the same text."""
    distance = 0.0
    for index, (mine, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        distance = max([distance, *(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())])
        if one.token_ids[index] != other.token_ids[index]:
            break
    return distance


def measure(
    engine: VllmEngine, *, prompt_tokens: int, pairs: int, trace_dir: Path, phase: Callable[[str], None]
) -> Findings:
    """Serve the prompt in every way, and collect what happened; `phase` is told what is being done."""
    phase(f"serving {prompt_tokens:,} tokens cold: {ANSWER_TOKENS} tokens of answer, which also warms the engine up")
    prompt = prompt_of(engine, tokens=prompt_tokens)
    timelines: list[Timeline] = []

    def at_length() -> Answer:
        return engine.serve(prompt, tokens=ANSWER_TOKENS, logprobs=TOP_LOGPROBS)

    def warm(request: Callable[[], Answer]) -> Answer:
        engine.forget()
        answer = request()
        if answer.cached_tokens:
            trace = _eventually(lambda: next(trace_dir.glob("load-*.json"), None), "the load's timeline")
            timelines.append(read_timeline(trace))
            trace.unlink()
        return answer

    cold_long = at_length()
    phase("serving it warm: the same answer twice, to compare")
    local_long = at_length()
    warm_long = warm(at_length)
    timelines.clear()
    engine.forget(host_pool=True)
    phase("serving it cold: time to first token")
    cold = engine.serve(prompt)
    phase(f"serving it warm: time to first token, {pairs} pairs")
    measured = tuple(alternate(lambda: warm(lambda: engine.serve(prompt)), lambda: engine.serve(prompt), pairs))
    return Findings(
        hit_tokens=(prompt_tokens - 1) // engine.block_tokens * engine.block_tokens,
        block_tokens=engine.block_tokens,
        dtype=engine.dtype,
        cold=cold,
        pairs=measured,
        long=(warm_long, local_long, cold_long),
        timelines=tuple(timelines),
    )


def table_of(findings: Findings) -> Table:
    """The findings as a table."""
    warm_s, local_s = (
        statistics.median(answer.seconds for answer in side) for side in zip(*findings.pairs, strict=True)
    )
    ratio = ratio_interval([(ours.seconds, theirs.seconds) for ours, theirs in findings.pairs])
    warm, local, cold = findings.long
    ours_is_theirs = "logprobs bit-equal" if warm.logprobs == local.logprobs else "[red]logprobs differ[/]"

    def median(value: Callable[[Timeline], float]) -> float:
        return statistics.median(map(value, findings.timelines)) if findings.timelines else float("nan")

    table = Table(
        title=f"{MODEL_NAME} in {findings.dtype}, the same prompt three ways", title_justify="left", show_header=False
    )
    for row in (
        ("cold: time to first token", f"{findings.cold.seconds * 1e3:,.0f} ms"),
        ("vLLM's own prefix hit, median", f"{local_s * 1e3:,.1f} ms"),
        ("through LayerStream, median", f"[bold]{warm_s * 1e3:,.1f} ms[/]"),
        (
            "LayerStream / vLLM's own hit",
            f"{ratio.median:.2f} (95 % interval {ratio.low:.2f} to {ratio.high:.2f}, {ratio.samples} pairs)",
        ),
        ("speed-up over cold", f"[bold]{findings.cold.seconds / warm_s:,.1f} x[/]"),
        ("hit tokens", _listed({ours.cached_tokens for ours, _ in findings.pairs})),
        ("bytes moved per hit", f"{median(lambda t: t.nbytes) / 1e6:,.1f} MB"),
        ("load rate", f"{median(lambda t: t.nbytes / t.load_seconds / 1e9):.2f} GB/s"),
        ("overlap ratio", f"{median(lambda t: t.overlap_ratio):.3f}"),
        ("exposed stall", f"{median(lambda t: t.stall_seconds) * 1e3:.2f} ms"),
        ("answer against vLLM's own hit", f"{_same(warm, local)}, {ours_is_theirs}"),
        ("answer against cold", f"{_same(warm, cold)}, logprobs within {logprob_distance(warm, cold):.2g}"),
        ("vLLM's own hit against cold", f"{_same(local, cold)}, logprobs within {logprob_distance(local, cold):.2g}"),
    ):
        table.add_row(*row)
    return table


def _same(one: Answer, other: Answer) -> str:
    return f"same {len(one.token_ids)} tokens" if one.token_ids == other.token_ids else "[red]tokens differ[/]"


def run(*, out: Path, prompt_tokens: int, pairs: int) -> int:
    """Run the demo; returns the exit status: 0 if every hit was whole and every answer agreed.

    Writes `timeline.json` (Chrome trace), `timeline.png` and `engine.log` into `out`.

    Raises:
        ConfigError: an argument cannot be used, or something that is needed is missing.
    """
    if prompt_tokens not in PROMPT_TOKENS or not 1 <= pairs <= MAX_PAIRS:
        raise ConfigError(
            f"the demo serves {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[-1]} tokens in 1 to {MAX_PAIRS} pairs, "
            f"got {prompt_tokens} tokens and {pairs} pairs; choose within these"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        log = (out / "engine.log").open("wb")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); name another folder with --out") from error
    with log, _output_to(log.fileno()) as screen:
        console = Console(file=screen)
        try:
            findings = _measure_on_screen(console, prompt_tokens=prompt_tokens, pairs=pairs)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever ended vLLM is told with its log, not as a traceback of ours
            return _explain(console, error, Path(log.name))
        console.print(table_of(findings))
        _write_timeline(console, findings, out)
        problems = findings.problems()
        for problem in problems:
            console.print(f"[bold red]FAILED:[/] {escape(problem)}")
        return 1 if problems else 0


def _measure_on_screen(console: Console, *, prompt_tokens: int, pairs: int) -> Findings:
    """Model, engine and measurements, with a line on the screen that says what is being done."""
    with _phases(console) as phase, tempfile.TemporaryDirectory() as traces:
        phase(f"preparing {MODEL_NAME}")
        model = prepare_model(progress=phase)
        phase("starting vLLM with LayerStreamConnector (about a minute)")
        engine = VllmEngine(model, max_tokens=prompt_tokens + ANSWER_TOKENS, trace_dir=Path(traces))
        try:
            return measure(engine, prompt_tokens=prompt_tokens, pairs=pairs, trace_dir=Path(traces), phase=phase)
        finally:
            phase("stopping the engine")
            engine.close()


@contextmanager
def _phases(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner with a clock; the callable begins the next phase and leaves a line about the one before it."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        begun, doing = time.monotonic(), ""

        def phase(what: str) -> None:
            nonlocal begun, doing
            if doing:
                console.print(f"[green]done[/] {doing} [dim]({time.monotonic() - begun:.1f} s)[/]", soft_wrap=True)
            begun, doing = time.monotonic(), what
            progress.reset(task, description=what)

        yield phase
        phase("")


def _write_timeline(console: Console, findings: Findings, out: Path) -> None:
    """Write the median load's trace and picture, and say how to read them."""
    if not findings.timelines:
        return
    by_stall = sorted(findings.timelines, key=lambda timeline: timeline.stall_seconds)
    timeline = by_stall[len(by_stall) // 2]
    trace = out / "timeline.json"
    trace.write_bytes(msgspec.json.encode(timeline.chrome_trace()))
    console.print(f"Timeline of one load: {escape(str(trace))} (open it in https://ui.perfetto.dev)", soft_wrap=True)
    try:
        picture = draw_timeline(timeline, out / "timeline.png", hit_tokens=findings.hit_tokens)
    except ConfigError as error:
        console.print(f"[yellow]No picture:[/] {escape(str(error))}")
        return
    console.print(
        f"Its picture: {escape(str(picture))}. A layer's bytes (blue) that arrive before its compute (green) begins "
        "were hidden behind the layers before it; what the compute waited for them is orange.",
        soft_wrap=True,
    )


def _explain(console: Console, error: Exception, log: Path) -> int:
    """Say what ended the engine, and what to do; returns the exit status."""
    sys.stdout.flush()
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    console.rule(f"the last lines of {log}")
    console.print("\n".join(tail), markup=False, highlight=False)
    console.rule()
    console.print(f"[bold red]FAILED:[/] {escape(f'{type(error).__name__}: {error}')}")
    console.print(f"Run `layerstream doctor` to see what this machine lacks; the engine's whole log is {log}.")
    return 1


@contextmanager
def _output_to(target: int) -> Iterator[TextIO]:
    """Send what this process and its children print into the file descriptor `target`; yields the screen.

    By descriptor, since libraries and child processes write past `sys.stdout`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        with os.fdopen(os.dup(1), "w", encoding=encoding, errors="replace") as screen:
            os.dup2(target, 1)
            os.dup2(target, 2)
            try:
                yield screen
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(saved[0], 1)
                os.dup2(saved[1], 2)
    finally:
        for descriptor in saved:
            os.close(descriptor)
