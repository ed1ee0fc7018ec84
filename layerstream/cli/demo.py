"""`layerstream demo`: one long prompt on the real vLLM engine, cold, on vLLM's own prefix hit, and through LayerStream.

Time to first token is the wall time of serving one token, as a caller sees it. What vLLM and its processes print goes
to `engine.log` in the output folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from layerstream.cli.findings import Findings, table_of
from layerstream.cli.prose import prompt_of
from layerstream.cli.screen import explain_failure, output_to, phases
from layerstream.errors import ConfigError, LayerStreamError
from layerstream.hooks.vllm.local_engine import SETTLE_S, Answer, LocalEngine
from layerstream.model_store import MODEL_NAME, prepare_model
from layerstream.picture import draw_timeline
from layerstream.timeline import Timeline, read_timeline
from layerstream.trials import MAX_PAIRS, alternate

PROMPT_TOKENS = range(256, 8001)
"""Prompts the demo serves: at least one whole block of any engine, and room for the answer in the model's 8,192."""
ANSWER_TOKENS = 16
"""Tokens of the requests whose output is compared."""
TOP_LOGPROBS = 5


def _eventually(attempt: Callable[[], Any], what: str) -> Any:
    """The first result of `attempt` that is not None."""
    deadline = time.monotonic() + SETTLE_S
    while (result := attempt()) is None:
        if time.monotonic() > deadline:
            raise LayerStreamError(f"waited {SETTLE_S:g} s for {what} in vain")
        time.sleep(0.01)
    return result


def measure(
    engine: LocalEngine, *, prompt_tokens: int, pairs: int, trace_dir: Path, phase: Callable[[str], None]
) -> Findings:
    """Serve the prompt in every way, and collect what happened; `phase` is told what is being done."""
    phase(f"serving {prompt_tokens:,} tokens cold: {ANSWER_TOKENS} tokens of answer, which also warms the engine up")
    prompt = prompt_of(engine.tokenize, tokens=prompt_tokens)
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
    engine.forget(connector=True)
    phase("serving it cold: time to first token")
    cold = engine.serve(prompt)
    phase(f"serving it warm: time to first token, pairs: {pairs}")
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
    with log, output_to(log.fileno()) as screen:
        console = Console(file=screen)
        try:
            findings = _measure_on_screen(console, prompt_tokens=prompt_tokens, pairs=pairs)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever ended vLLM is told with its log, not as a traceback of ours
            return explain_failure(console, error, Path(log.name))
        console.print(table_of(findings))
        _write_timeline(console, findings, out)
        problems = findings.problems()
        for problem in problems:
            console.print(f"[bold red]FAILED:[/] {escape(problem)}")
        return 1 if problems else 0


def _measure_on_screen(console: Console, *, prompt_tokens: int, pairs: int) -> Findings:
    """Model, engine and measurements, with a line on the screen that says what is being done."""
    with phases(console) as phase, tempfile.TemporaryDirectory() as traces:
        phase(f"preparing {MODEL_NAME}")
        model = prepare_model(progress=phase)
        phase("starting vLLM with LayerStreamConnector (about a minute)")
        engine = LocalEngine(
            model,
            max_model_len=prompt_tokens + ANSWER_TOKENS,
            max_num_seqs=1,
            options={"host_gib": 1, "recompute": "never", "trace_dir": traces},
        )
        try:
            return measure(engine, prompt_tokens=prompt_tokens, pairs=pairs, trace_dir=Path(traces), phase=phase)
        finally:
            phase("stopping the engine")
            engine.close()


def _write_timeline(console: Console, findings: Findings, out: Path) -> None:
    """Write the median load's trace and picture, and say how to read them."""
    if not findings.timelines:
        return
    by_stall = sorted(findings.timelines, key=lambda timeline: timeline.stall_seconds)
    timeline = by_stall[len(by_stall) // 2]
    trace = out / "timeline.json"
    trace.write_text(json.dumps(timeline.chrome_trace()), encoding="utf-8")
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
