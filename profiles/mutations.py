"""Can the tests fail? Faults made by hand in the code, one at a time, and the test that finds each.

    python profiles/mutations.py --out profiles/results/DATE-mutants/mutants.json

Each fault replaces one line's text in a copy of the checkout, in a temporary folder; then the tests named for it run
there until one fails. Before all of them the same tests run on the code as it is, and must pass. No engine is started.
Exits 0 if every fault was found, 1 if one was not, 2 if a fault cannot be made: its text is no longer there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("layerstream", "hooks", "kernels", "graphs", "tests", "profiles", "pyproject.toml", "README.md")
LONGEST_S = 600.0
"""What the tests named for one fault may take. A hang is found by pytest's own timeout long before."""


class StaleFault(Exception):
    """A fault's text is not where it should be."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A fault: some text of a file, what is there instead, and the tests to run."""

    name: str
    file: str
    old: str
    """Part of one line, found exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """What pytest is given: files, or tests in them."""

    def applied(self, source: str) -> str:
        """The file's text with the fault in it.

        Raises:
            StaleFault: the text to be replaced is not there, or more than once.
        """
        times = source.count(self.old)
        if times != 1:
            raise StaleFault(
                f"{self.name!r} replaces {self.old.strip()!r} in {self.file}, which is there {times} times and must be "
                "there once; write the fault anew for the code as it is"
            )
        return source.replace(self.old, self.new)


COORDINATOR, INDEX, FLIGHTS = "layerstream/coordinator.py", "layerstream/index.py", "layerstream/flights.py"
ENGINE, TRANSFERS = "layerstream/engine.py", "layerstream/transfers.py"
SCHEDULER, COMPAT, HASHES = "hooks/vllm/scheduler.py", "hooks/vllm/compat.py", "hooks/vllm/block_hashes.py"
REPORTED, CALLS = "tests/hooks/vllm/test_reported_requests.py", "tests/hooks/vllm/test_call_sequences.py"

MUTATIONS = (
    Mutation(
        name="blocks of a parked load are not held",
        file=COORDINATOR,
        old="            self._holds.hold(job.all_block_ids)",
        new="            pass",
        tests=("tests/test_coordinator.py",),
    ),
    Mutation(
        name="what is loaded is not pinned",
        file=COORDINATOR,
        old="        self._pool().pin(spans)",
        new="        self._pool()",
        tests=("tests/test_coordinator.py",),
    ),
    Mutation(
        name="a pin is never given back",
        file=COORDINATOR,
        old="        pool.unpin(flight.spans)",
        new="        pass",
        tests=("tests/test_coordinator.py",),
    ),
    Mutation(
        name="the block of the last token is a hit",
        file=COORDINATOR,
        old="        limit = (num_tokens - 1) // self._block_tokens",
        new="        limit = num_tokens // self._block_tokens",
        tests=("tests/hooks/vllm/test_partial_hits.py::test_a_full_hit_leaves_a_token_to_compute",),
    ),
    Mutation(
        name="vLLM's own hit counts twice",
        file=COORDINATOR,
        old="                found_tokens=(found - local) * self._block_tokens,",
        new="                found_tokens=found * self._block_tokens,",
        tests=("tests/hooks/vllm/test_partial_hits.py::test_a_full_hit_leaves_a_token_to_compute",),
    ),
    Mutation(
        name="two requests load one prefix into blocks of their own",
        file=COORDINATOR,
        old="        if hashes[local] in self._arriving:",
        new="        if hashes[local] in ():",
        tests=("tests/test_coordinator.py",),
    ),
    Mutation(
        name="a save that failed is published",
        file=COORDINATOR,
        old="            if flight.failed:",
        new="            if ():",
        tests=("tests/test_coordinator.py",),
    ),
    Mutation(
        name="what was computed before a reset is saved after it",
        file=COORDINATOR,
        old="            request.due = _NEVER",
        new="            pass",
        tests=("tests/hooks/vllm/test_resets.py",),
    ),
    Mutation(
        name="a load that failed is told of as one that ended well",
        file=COORDINATOR,
        old="(self._failed if flight.failed else self._received).append(job.request_id)",
        new="self._received.append(job.request_id)",
        tests=(f"{REPORTED}::test_a_failed_load_over_several_groups_fails_its_request_alone",),
    ),
    Mutation(
        name="blocks are published behind blocks that are not",
        file=INDEX,
        old="            if not chunk.landed or (chunk.parent is not None and chunk.parent.ready < chunk.at):",
        new="            if not chunk.landed:",
        tests=("tests/hooks/vllm/test_save_completions.py",),
    ),
    Mutation(
        name="what a load reads is evicted",
        file=INDEX,
        old="        busy = chunk.pins or chunk.writers",
        new="        busy = chunk.writers",
        tests=("tests/test_index.py",),
    ),
    Mutation(
        name="a chunk grows over what a late save may still write",
        file=INDEX,
        old=" and not parent.closed:",
        new=":",
        tests=("tests/test_index.py", "tests/test_index_against_model.py"),
    ),
    Mutation(
        name="a reset gives away slots in use",
        file=INDEX,
        old="            if not (chunk.pins or chunk.writers):",
        new="            if not ():",
        tests=("tests/hooks/vllm/test_resets.py",),
    ),
    Mutation(
        name="pages are counted from a chunk's second block",
        file=INDEX,
        old="(chunk.slot * self.chunk_blocks + lo, hi - lo)",
        new="(chunk.slot * self.chunk_blocks + max(lo - 1, 0), hi - lo)",
        tests=("tests/test_long_prefixes.py", "tests/hooks/vllm/test_partial_hits.py"),
    ),
    Mutation(
        name="one rank's answer is enough",
        file=FLIGHTS,
        old="                if flight.answers >= self.world_size:",
        new="                if flight.answers >= 1:",
        tests=("tests/hooks/vllm/test_scheduling.py::test_a_hit_is_offered_only_after_every_rank_reported",),
    ),
    Mutation(
        name="a gate waits for nothing",
        file=ENGINE,
        old="                compute.wait(part.done)",
        new="                pass",
        tests=("tests/test_late_gates.py",),
    ),
    Mutation(
        name="a layer's hook saves another layer",
        file=ENGINE,
        old="        group = save.group_of(layer)",
        new="        group = save.group_of(self._layers - 1 - layer)",
        tests=("tests/contracts/test_transfer_path.py", "tests/test_engine.py"),
    ),
    Mutation(
        name="a step does not wait for what reads its blocks",
        file=ENGINE,
        old="            compute.wait(save.parts[-1].joined)",
        new="            pass",
        tests=("tests/test_engine_orders.py",),
    ),
    Mutation(
        name="what no hook saved is left out",
        file=ENGINE,
        old="        if rest and not save.failed:",
        new="        if ():",
        tests=(f"{CALLS}::test_whatever_is_to_do_and_whichever_hooks_run_every_job_ends_right",),
    ),
    Mutation(
        name="hooks that never ran are relied on",
        file=ENGINE,
        old="if not (layerwise and self._hooked[layer]))",
        new="if not layerwise)",
        tests=("tests/hooks/vllm/test_side_caches.py",),
    ),
    Mutation(
        name="a gated load is over before its gates are",
        file=TRANSFERS,
        old="        return arrived and (self.closed is None or self.closed.done())",
        new="        return arrived",
        tests=("tests/contracts/test_transfer_path.py",),
    ),
    Mutation(
        name="tokens that are only guessed are saved",
        file=SCHEDULER,
        old="                min(request.num_computed_tokens + scheduled, request.num_tokens),",
        new="                request.num_computed_tokens + scheduled,",
        tests=("tests/hooks/vllm/test_accepted_tokens.py",),
    ),
    Mutation(
        name="hooks are relied on where each runs more than once",
        file="hooks/vllm/worker.py",
        old="layerwise=self._hooks_tell_layers and mode is GateMode.LAYERWISE,",
        new="layerwise=mode is GateMode.LAYERWISE,",
        tests=("tests/hooks/vllm/test_worker.py",),
    ),
    Mutation(
        name="nobody is told of a load that failed",
        file=SCHEDULER,
        old="        self._failed.update(outcome.failed)",
        new="        pass",
        tests=(f"{REPORTED}::test_a_failed_load_over_several_groups_fails_its_request_alone",),
    ),
    Mutation(
        name="blocks that another connector failed to load are trusted",
        file=SCHEDULER,
        old="            coordinator.distrust(output.invalid_block_ids)",
        new="            pass",
        tests=("tests/hooks/vllm/test_scheduling.py::test_blocks_another_connector_failed_to_load_are_not_published",),
    ),
    Mutation(
        name="a FULL step is taken for one that runs hooks",
        file=COMPAT,
        old='            context_full=getattr(mode, "name", None) == "FULL",',
        new="            context_full=False,",
        tests=("tests/hooks/vllm/test_short_remainders.py",),
    ),
    Mutation(
        name="an adapter's weights are left out of names",
        file=HASHES,
        old='adapter = b"" if request.lora_request is None else self._adapter(request.lora_request, look=fresh)',
        new='adapter = b""',
        tests=("tests/hooks/vllm/test_block_hashes.py",),
    ),
    Mutation(
        name="nobody waits for the rest of a released load",
        file="layerstream/jobs.py",
        old="        return bool(self.released) or any(job.kind is JobKind.LOAD for job in self.jobs)",
        new="        return any(job.kind is JobKind.LOAD for job in self.jobs)",
        tests=("tests/test_coordinator_release.py", "tests/hooks/vllm/test_early_release.py"),
    ),
    Mutation(
        name="a load that failed on a rank is released",
        file="layerstream/flights.py",
        old="            if flight.releases >= self.world_size and not flight.failed:",
        new="            if flight.releases >= self.world_size:",
        tests=("tests/test_coordinator_release.py",),
    ),
    Mutation(
        name="every group of heads is a rank's first",
        file="layerstream/head_groups.py",
        old="page_head=place * heads",
        new="page_head=0",
        tests=("tests/test_head_groups.py", "tests/tiers/test_bounce.py"),
    ),
    Mutation(
        name="computing is preferred where estimates are doubtful",
        file="layerstream/chooser.py",
        old="rates.line(LOAD, errors=-errors), rates.forward(case.found_tokens, errors=errors)",
        new="rates.line(LOAD, errors=errors), rates.forward(case.found_tokens, errors=-errors)",
        tests=("tests/test_chooser.py",),
    ),
    Mutation(
        name="a prompt that was used again stays on probation",
        file="layerstream/insertion.py",
        old="        item.probation = False",
        new="        pass",
        tests=("tests/test_insertion.py",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a fault."""

    fault: str
    file: str
    line: str
    caught_by: str | None
    """The first test that failed; None if all passed."""
    seconds: float


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need, links as links."""
    for name in COPIED:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source / name, target / name)


def failing(folder: Path, tests: Sequence[str]) -> str | None:
    """The first of these tests that fails in a copy; None if all pass.

    Raises:
        RuntimeError: they cannot be run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not engine"]
    # Byte code is told from old byte code by size and second of the source, which two faults may have in common.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *tests], cwd=folder, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    if done.returncode == 0:
        return None
    told = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or told is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return told[1]


def try_out(mutations: Iterable[Mutation], source: Path = ROOT) -> list[Verdict]:
    """Make each fault in a copy of `source`, and see which test finds it.

    Raises:
        StaleFault: a fault's text is not there.
        RuntimeError: tests fail without any fault, or cannot be run.
    """
    chosen = tuple(mutations)
    for mutation in chosen:
        mutation.applied((source / mutation.file).read_text(encoding="utf-8"))
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="layerstream-mutants-") as place:
        folder = Path(place)
        copy_tree(source, folder)
        if (red := failing(folder, list(dict.fromkeys(test for each in chosen for test in each.tests)))) is not None:
            raise RuntimeError(f"{red} fails without any fault; nothing can be said of the tests before it passes")
        for mutation in chosen:
            path = folder / mutation.file
            right, begun = path.read_text(encoding="utf-8"), time.monotonic()
            path.write_text(mutation.applied(right), encoding="utf-8")
            found = failing(folder, mutation.tests)
            path.write_text(right, encoding="utf-8")
            seconds = round(time.monotonic() - begun, 1)
            print(f"{seconds:6.1f} s  {mutation.name}: {found or 'NOT FOUND'}", flush=True)
            verdicts.append(
                Verdict(
                    fault=mutation.name,
                    file=mutation.file,
                    line=f"{mutation.old.strip()} -> {mutation.new.strip()}",
                    caught_by=found,
                    seconds=seconds,
                )
            )
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python profiles/mutations.py", description="Make faults; tests find them.")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--only", help="make only faults whose name has this in it")
    chosen = parser.parse_args(arguments)
    _import_from_checkout()
    from profiles.microbench.machine import commit, describe_machine, versions

    started = datetime.now(UTC)
    wanted = [each for each in MUTATIONS if chosen.only is None or chosen.only in each.name]
    try:
        verdicts = try_out(wanted)
    except StaleFault as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    missed = [verdict.fault for verdict in verdicts if verdict.caught_by is None]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} faults were found")
    if chosen.out is not None:
        result = {
            "started": started.isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": versions(),
            "commit": commit(ROOT),
            "faults": len(verdicts),
            "not found": missed,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {chosen.out}")
    return int(bool(missed))


def _import_from_checkout() -> None:
    """Make `profiles` mean the checkout's: it is not installed, and others' packages are called so too."""
    if str(ROOT / "profiles") not in getattr(sys.modules.get("profiles"), "__path__", ()):
        package = types.ModuleType("profiles")
        package.__path__ = [str(ROOT / "profiles")]
        sys.modules["profiles"] = package


if __name__ == "__main__":
    sys.exit(main())
