"""Runs a part in a process of its own, watched: what hangs or dies costs its row, and the rest goes on in a new one.

The process writes a line of JSON for whatever happens: which check begins, each row, and the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.checks import OUT_OF_TIME, Part, last_line, run_check
from profiles.gpu_validate.machine import ROOT
from profiles.gpu_validate.rows import Row, failed, row_from, row_json

POLL_S = 0.05
KILL_S = 20.0
"""What a killed process may take to end."""
START_S = 60.0
"""What a process may take until its first check begins."""


def run_here(part: Part, checks: Sequence[int], bench: Bench, lines: Path) -> None:
    """The inner side: run some checks of a part in this process and write down what happens."""
    errors: list[BaseException] = []
    with lines.open("a", encoding="utf-8") as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        for number in checks:
            write(begin=number)
            for row in run_check(part.checks[number], bench, errors.append):
                write(row=row_json(row))
            write(end=number)
            # The CUDA context may be lost, so what follows needs another process.
            if bench.cuda and errors and isinstance(errors[-1], RuntimeError):
                write(broken=str(errors[-1]))
                return


class Watched:
    """The outer side: one process, and what it has written so far."""

    def __init__(self, command: Sequence[str], lines: Path, log: Path) -> None:
        lines.unlink(missing_ok=True)
        with log.open("a", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._lines, self._read = lines, 0

    def news(self) -> list[dict[str, Any]]:
        """Whole lines written since the last call."""
        if not self._lines.exists():
            return []
        with self._lines.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def status(self) -> int | None:
        """The exit status, if it has ended."""
        return self._process.poll()

    def kill(self) -> None:
        """End it and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        # One that is stuck in the driver does not end, and is left behind.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


def run_apart(part: Part, out: Path, options: Sequence[str], *, budget_s: float | None = None) -> Iterator[Row]:
    """All rows of a part.

    Args:
        part: the part.
        out: folder for pictures and logs.
        options: further command line options of the process.
        budget_s: seconds for all of it; the part's own if not given.
    """
    budget_s = part.budget_s if budget_s is None else budget_s
    deadline = time.monotonic() + budget_s
    lines, log = out / f".{part.name}.lines", out / "logs" / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    todo = list(range(len(part.checks)))
    try:
        while todo:
            if (left := deadline - time.monotonic()) <= 0:
                yield from (failed(part.checks[number].title, OUT_OF_TIME) for number in todo)
                return
            # Unbuffered, and with a stack where it crashes, so that the log has the last words of one that dies.
            command = [sys.executable, "-u", "-X", "faulthandler", "-m", "profiles.gpu_validate", "--part", part.name]
            command += ["--lines", str(lines)]
            command += ["--checks", ",".join(map(str, todo)), "--seconds", f"{left:.1f}", "--out", str(out), *options]
            watched = Watched(command, lines, log)
            try:
                yield from _watch(watched, part, todo, deadline, log)
            finally:
                watched.kill()
    finally:
        lines.unlink(missing_ok=True)


def _watch(watched: Watched, part: Part, todo: list[int], deadline: float, log: Path) -> Iterator[Row]:
    """Rows of one process, taking checks off `todo` as they end. One that hangs or dies is taken off as well."""
    limit = min(deadline, time.monotonic() + START_S)
    while todo:
        status = watched.status()
        news = watched.news()
        for line in news:
            if "begin" in line:
                limit = min(deadline, time.monotonic() + part.checks[line["begin"]].limit_s)
            elif "row" in line:
                yield row_from(line["row"])
            elif "end" in line:
                todo.remove(line["end"])
            else:
                # It may hang while it ends, and nothing more is expected of it.
                return
        if news:
            continue
        if status is not None:
            text = last_line(log.read_text(encoding="utf-8", errors="replace"))
            yield failed(part.checks[todo.pop(0)].title, f"its process ended with status {status}: {text}")
            return
        if time.monotonic() > limit:
            over = OUT_OF_TIME if limit == deadline else "it hangs: its process was ended"
            yield failed(part.checks[todo.pop(0)].title, over)
            return
        time.sleep(POLL_S)
