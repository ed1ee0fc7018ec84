"""A part is a list of checks; each gives rows, and one that raises costs no other its rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.rows import Row, failed, not_run

NO_GPU = "no CUDA device"
OUT_OF_TIME = "out of time: its part had used up its budget"


class Check(NamedTuple):
    """Something to find out."""

    title: str
    """Names the row that stands for it where it gave none."""
    run: Callable[[Bench], Iterator[Row]]
    gpu_only: bool = False
    limit_s: float = 60.0
    """A check that takes longer hangs, and its process is ended."""


class Part(NamedTuple):
    """Checks that share a budget and, while none of them breaks it, a process."""

    name: str
    budget_s: float
    checks: Sequence[Check]


def run_check(check: Check, bench: Bench, broke: Callable[[BaseException], None] | None = None) -> Iterator[Row]:
    """The rows of one check.

    Args:
        check: the check.
        bench: where it runs.
        broke: is told of what it raised.
    """
    if check.gpu_only and not bench.cuda:
        yield not_run(check.title, NO_GPU)
        return
    if bench.left() <= 0:
        yield failed(check.title, OUT_OF_TIME)
        return
    try:
        yield from check.run(bench)
    except Exception as error:  # noqa: BLE001 - whatever a check raises is its result
        traceback.print_exc()
        yield failed(check.title, last_line(f"{type(error).__name__}: {error}"))
        if broke is not None:
            broke(error)


def last_line(text: str) -> str:
    """The last line that says something; CUDA's errors end in advice about debugging, which says nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["no message"])[-1][:300]
