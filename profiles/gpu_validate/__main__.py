"""Everything that has to be seen on a GPU, by one command: exact bytes, order, rates, overlap, and what it costs.

    python -m profiles.gpu_validate

Run it from the checkout. It needs torch, triton, numpy and einops alone, takes at most eight minutes on a GPU, and
where there is none runs what has a form for CPUs. It prints one table and writes JSON and pictures. Exits 0 if nothing
failed, was missed or could not be told, 2 if torch cannot use the GPU that is there, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from layerstream.cli.results import Results
from profiles.gpu_validate.apart import run_apart, run_here
from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.checks import Part
from profiles.gpu_validate.machine import ROOT, commit, describe, slug, versions
from profiles.gpu_validate.rows import Row, faults, met, table

TOTAL_S = 470.0
"""Eight minutes, less what the table and the files take."""
LEAST_S = 5.0
"""What a part gets in any case, to say what it had no time for."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""There where the NVIDIA driver is."""
PARTS_MODULE = "profiles.gpu_validate.parts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    chosen = _parser().parse_args(arguments)
    place = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    parts: tuple[Part, ...] = importlib.import_module(chosen.parts).PARTS
    if chosen.part is not None:
        return _inside(chosen, parts, place)
    asked = [part for part in parts if not chosen.only or part.name in chosen.only]
    if unknown := sorted(set(chosen.only) - {part.name for part in parts}):
        names = ", ".join(part.name for part in parts)
        print(f"gpu_validate: no part is called {', '.join(unknown)}; there are {names}", file=sys.stderr)
        return 2
    if place.type == "cpu" and NVIDIA_DEVICE.exists():
        print(
            f"gpu_validate: this machine has an NVIDIA GPU, and {sys.executable} has torch {torch.__version__}, which "
            "cannot use it; run it by a python whose torch can: make gpu-validate GPU_PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 2
    started, facts = datetime.now(UTC), describe(place)
    out = chosen.out or ROOT / "profiles" / "results" / f"{started:%Y-%m-%d}-{slug(facts['device'])}"
    out.mkdir(parents=True, exist_ok=True)
    print(f"{facts['device']}, driver {facts['driver']}, CUDA {facts['CUDA']}, torch {torch.__version__}", flush=True)
    rows = _all_rows(asked, out, chosen)
    results = Results(
        started=started,
        settings={"quick": chosen.quick, "parts": ", ".join(part.name for part in asked)},
        machine=facts,
        versions=versions(),
        commit=commit(),
        rows=rows,
    )
    (out / "gpu_validate.json").write_text(results.to_json(), encoding="utf-8")
    print(f"\n{table(rows)}\n\nwritten to {out}")
    return _verdict(rows)


def _all_rows(parts: Sequence[Part], out: Path, chosen: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    deadline = time.monotonic() + TOTAL_S
    for part in parts:
        begun = time.monotonic()
        options = ["--parts", chosen.parts] + ["--quick"] * chosen.quick
        found = list(run_apart(part, out, options, budget_s=min(part.budget_s, max(LEAST_S, deadline - begun))))
        rows += found
        bad = len(faults(found))
        print(
            f"{part.name}: {len(found)} rows in {time.monotonic() - begun:.0f} s"
            + (f", {bad} not good" if bad else ""),
            flush=True,
        )
    return rows


def _verdict(rows: Sequence[Row]) -> int:
    open_rows = [row for row in rows if met(row).startswith("unresolved")]
    if open_rows:
        print(f"{len(open_rows)} rows are unresolved: {'; '.join(row.name for row in open_rows)}")
    bad = faults(rows)
    if bad:
        print(f"{len(bad)} rows are not good: {'; '.join(row.name for row in bad)}")
        return 1
    skipped = sum(met(row) == "not run" for row in rows)
    print(f"nothing failed or was missed; {skipped} rows were not run")
    return 0


def _inside(chosen: argparse.Namespace, parts: Sequence[Part], place: torch.device) -> int:
    """One part's process."""
    part = next(part for part in parts if part.name == chosen.part)
    bench = Bench(place=place, quick=chosen.quick, deadline=time.monotonic() + chosen.seconds, out=chosen.out)
    run_here(part, [int(number) for number in chosen.checks.split(",")], bench, chosen.lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiles.gpu_validate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="this part only; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: for trying it out")
    parser.add_argument("--out", type=Path, help="folder for the results; default profiles/results/<date>-<device>")
    # What one process tells another.
    parser.add_argument("--parts", default=PARTS_MODULE, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--checks", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
