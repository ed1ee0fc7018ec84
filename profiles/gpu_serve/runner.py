"""Runs one system in a process of its own, for at most so long, and keeps what it told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from profiles.gpu_serve.observations import Observation, parse_lines
from profiles.gpu_serve.plan import SystemSpec
from profiles.microbench.engine_process import ROOT, end_group

POLL_S = 0.2
GONE_S = 10.0
"""Longest wait for the processes of an engine that was ended: with the last of them its GPU memory is free."""
LOG_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of one system."""

    observations: tuple[Observation, ...] = ()
    problem: str = ""
    """Why there may be no more observations; empty if it went to its end."""

    def first(self, kind: str) -> Observation | None:
        """Its first observation of a kind."""
        return next((seen for seen in self.observations if seen.kind == kind), None)


def session_command(spec: SystemSpec, observations: Path) -> list[str]:
    """The command that runs a system."""
    return [sys.executable, "-m", "profiles.gpu_serve.session", spec.to_json(), str(observations)]


def run_system(command: Sequence[str], *, observations: Path, budget_s: float, say: Callable[[str], None]) -> Ran:
    """Run a command that appends to `observations`, and end its process group at the latest after `budget_s` seconds.

    What it prints goes to a file beside `observations` with the suffix `.log`.
    """
    log = observations.with_suffix(".log")
    observations.write_text("", encoding="utf-8")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + budget_s
    told = 0
    status: int | None = None
    try:
        while status is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            # Before the file is read, so that nothing written before the end is missed.
            status = process.poll()
            seen = _read(observations)
            for each in seen[told:]:
                say(str(each))
            told = len(seen)
    finally:
        end_group(process)
        _wait_until_gone(process.pid)
    seen = _read(observations)
    problem = ""
    if status is None:
        problem = f"cut off after {budget_s:g} s, its budget (--budget-s)"
    elif status != 0 or not any(each.kind == "end" for each in seen):
        problem = f"ended with status {status}: {_last_words(log)} (all of it in {log})"
    if problem:
        say(problem)
    return Ran(observations=tuple(seen), problem=problem)


def _read(observations: Path) -> list[Observation]:
    """All complete lines; the last one may still be being written."""
    text = observations.read_text(encoding="utf-8")
    return parse_lines(text[: text.rfind("\n") + 1].splitlines())


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + GONE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LOG_LINES:]) or "it printed nothing"
