"""The terminal while a noisy engine runs: its output into a log, a line for each phase, a failure explained."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LOG_TAIL_LINES = 30


@contextmanager
def phases(console: Console) -> Iterator[Callable[[str], None]]:
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


def explain_failure(console: Console, error: Exception, log: Path) -> int:
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
def output_to(target: int) -> Iterator[TextIO]:
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
