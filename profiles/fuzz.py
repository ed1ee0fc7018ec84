"""The fuzzer's long form: random serving under vLLM's real scheduler, for minutes or hours, in several processes.

    python profiles/fuzz.py --minutes 60 --out profiles/results/DATE-fuzz.json

What is tried and what is checked stands in `tests/fuzz/machine.py` and docs/correctness.md. It prints a line for each
round, writes JSON at the end, and stops at the first failure, shrunk, with what repeats it. Exits 0 if nothing failed,
1 if something did, 2 if it was called wrongly.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES = 40
"""In a round: about a minute's work."""
RULES = 60
"""Most rules that an engine sees; the short form has half of it."""
ROUNDS_A_PROCESS = 30
"""After which a process is replaced."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    chosen = _parser().parse_args(arguments)
    # Sets of names keep their order from run to run, or a round could not be repeated. Read by the rounds' processes.
    os.environ["PYTHONHASHSEED"] = "0"
    _import_from_checkout()
    from profiles.microbench.machine import commit, describe_machine, versions
    from tests.fuzz.statistics import Statistics
    from tests.rigs.scheduler_faults import FAULTS

    if chosen.fault not in (None, *FAULTS):
        print(f"fuzz: no fault is called {chosen.fault!r}; there are {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    if chosen.reproduce is not None:
        failure = _round_in_one_process(chosen)
        print(failure or "nothing failed")
        return int(failure is not None)
    started, begun, machine = datetime.now(UTC), time.monotonic(), describe_machine()
    seen, rounds, failure = Statistics(), 0, None
    with _pool(chosen.processes) as pool:
        waiting = {pool.submit(run_round, chosen.seed + i, chosen.fault) for i in range(chosen.processes)}
        following = chosen.seed + chosen.processes
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                seed, statistics, found = future.result()
                seen.add(statistics)
                rounds += 1
                failure = failure or found
                minutes = (time.monotonic() - begun) / 60
                print(f"{minutes:6.1f} min  {_progress(seed, seen)}{'  FAILED' if found else ''}", flush=True)
                if failure is None and minutes < chosen.minutes:
                    waiting.add(pool.submit(run_round, following, chosen.fault))
                    following += 1
    minutes = (time.monotonic() - begun) / 60
    if failure is not None:
        print(f"\n{failure}", flush=True)
    if chosen.out is not None:
        result = {
            "started": started.isoformat(timespec="seconds"),
            "minutes": round(minutes, 1),
            "processes": chosen.processes,
            "rounds": rounds,
            "first seed": chosen.seed,
            "machine": machine,
            "versions": versions(),
            "commit": commit(ROOT),
            "fault planted": chosen.fault,
            "failure": failure,
            **seen.to_json(whole=False),
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {chosen.out}")
    return int(failure is not None)


def run_round(
    seed: int, fault: str | None, blob: str | None = None, *, engines: int = ENGINES, shrink: bool = True
) -> tuple[int, dict[str, Any], str | None]:
    """One round, in a process that may have run others.

    Args:
        seed: of what is drawn.
        fault: a fault to plant first (`tests.rigs.scheduler_faults`).
        blob: what hypothesis gave to repeat a failure; only that is run then.
        engines: to fuzz.
        shrink: whether to look for the shortest form of a failure, which takes minutes.

    Returns:
        The seed, what was seen (`Statistics.to_json`), and the failure if there is one.
    """
    _import_from_checkout()
    logging.disable(logging.ERROR)
    import hypothesis
    import pytest
    from hypothesis.stateful import run_state_machine_as_test

    from tests.fuzz import machine
    from tests.rigs.scheduler_faults import FAULTS

    machine.STATISTICS.__init__()  # type: ignore[misc]
    wanted = hypothesis.seed(seed)(type("ServingMachine", (machine.ServingMachine,), {}))
    if blob is not None:
        wanted = hypothesis.reproduce_failure(hypothesis.__version__, blob.encode())(wanted)
    settings = hypothesis.settings(
        max_examples=engines,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=True,
        phases=[phase for phase in hypothesis.Phase if shrink or phase is not hypothesis.Phase.shrink],
    )
    failure = None
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault].plant(patch)
        try:
            run_state_machine_as_test(wanted, settings=settings)
        except hypothesis.errors.DidNotReproduce:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it was found
            text = "".join(traceback.format_exception(error))
            failure = f"seed {seed}\n{text}\nRun it again with: python profiles/fuzz.py --reproduce BLOB"
    return seed, machine.STATISTICS.to_json(whole=True), failure


def _round_in_one_process(chosen: argparse.Namespace) -> str | None:
    with _pool(1) as pool:
        return pool.submit(run_round, chosen.seed, chosen.fault, chosen.reproduce).result()[2]


def _pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=ROUNDS_A_PROCESS
    )


def _progress(seed: int, seen: Any) -> str:
    return (
        f"seed {seed}: {seen.machines} engines, {seen.steps} steps, {sum(seen.rules.values())} rules, "
        f"{len(seen.states)} states, {sum(seen.faults.values())} faults, {seen.events['blocks loaded']} blocks loaded"
    )


def _import_from_checkout() -> None:
    """Make `tests` and `profiles` mean the checkout's: neither is installed, and others' packages are called so too."""
    for name in ("tests", "profiles"):
        if str(ROOT / name) not in getattr(sys.modules.get(name), "__path__", ()):
            package = types.ModuleType(name)
            package.__path__ = [str(ROOT / name)]
            sys.modules[name] = package


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python profiles/fuzz.py", description="Fuzz the connector under vLLM's scheduler."
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round after that many; 60 unless given")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--processes", type=int, default=2, help="at once; 2 unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the others follow")
    parser.add_argument("--fault", help="plant a fault by its name in tests/rigs/scheduler_faults.py")
    parser.add_argument("--reproduce", metavar="BLOB", help="repeat one failure, by what its report ends with")
    return parser


if __name__ == "__main__":
    sys.exit(main())
