"""A real engine on real tiers for minutes, while everything that can go wrong does; every answer is compared.

    python -m profiles.soak --minutes 10 --out out/soak.json

Run it from the checkout. vLLM serves a tiny random model with a small host pool over three tiers: disk, a Mooncake
Store, and an LMCache server, all of them real, in another order for each engine. Clients hold conversations that grow
and share beginnings, under several cache salts, and abort some. Meanwhile services are killed, hung and restarted,
files are damaged, the disk fills, and the engine itself is killed or stopped and started again.

Each answer's logprobs must be those of an engine without the connector; no request may fail, hang or be late; the byte
cap, the engine's memory and what is left behind are looked at. It prints a line for each engine and writes JSON. Exits
0 if all of it held and hits came from every tier, else 1.

`--control` leaves out the check of what comes from tiers, and damages the disk's files only: that run must find wrong
answers, and exits 0 if it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiles.soak.checks import Tally

ROOT = Path(__file__).parents[2]
LOG = ROOT / "out" / "soak.log"
DISK_MIB = 320
"""Size of the disk tier's filesystem; its cap lies below."""
CAP_GIB = 0.2
POOL_MIB = 48
"""Host pool: a few prompts' KV, so that most hits have to come from tiers."""
REMOTE_PEACE_S = (8.0, 25.0)
"""Shortest and longest time between two faults of a service. One that failed is left alone for a while after it is well
again (layerstream.tiers.breaker), and with less peace no tier but the disk would ever be asked."""
CONTROL_FAULT = "disk: bits flipped"
OPTIONS: dict[str, Any] = {
    "host_gib": POOL_MIB / 1024,
    "chunk_tokens": 128,
    # A model this small is computed sooner than anything is loaded, and tiers would have nothing to do.
    "recompute": "never",
    "log_interval_s": 0.01,
}
ENGINE: dict[str, Any] = {
    # In bfloat16 the differences between two right answers would be as large as those to a wrong one.
    "dtype": "float32",
    "block_size": 64,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    # vLLM's own cache is small too, or it would answer for the tiers.
    "num_gpu_blocks_override": 96,
    "enforce_eager": True,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    chosen = _parser().parse_args(arguments)
    _import_from_checkout()
    from profiles.microbench.machine import commit, describe_machine, versions
    from profiles.soak.checks import Tally

    started, machine, tally = datetime.now(UTC), describe_machine(), Tally()
    with ExitStack() as stack:
        prompts = _soak(chosen, stack, tally)
    result = {
        "started": started.isoformat(timespec="seconds"),
        "minutes": chosen.minutes,
        "seed": chosen.seed,
        "control": chosen.control,
        "machine": machine,
        "versions": versions(),
        "commit": commit(ROOT),
        "engine": ENGINE,
        "host pool, MiB": POOL_MIB,
        "disk cap, GiB": CAP_GIB,
        "prompts": prompts,
        **tally.to_json(),
    }
    print(json.dumps({name: result[name] for name in ("requests", "tiers", "faults", "broken")}, indent=1))
    print("\n".join(tally.violations[:10]), flush=True)
    if tally.broken:
        print(f"what the engines printed is in {chosen.log or LOG}")
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {chosen.out}")
    return int(not tally.broken["wrong answer"] if chosen.control else bool(tally.broken))


def _soak(chosen: argparse.Namespace, stack: ExitStack, tally: Tally) -> int:
    """All that needs engines and services; how many prompts there were."""
    from layerstream.model_store import tiny_model
    from profiles.soak.disk import volume
    from profiles.soak.engine import EngineLife
    from profiles.soak.faults import Misfortune
    from profiles.soak.run import Plan, Soak
    from profiles.soak.services import is_lmcache, services
    from profiles.soak.traffic import Shape, make_corpus
    from profiles.soak.watch import MIB, Watch, session

    say = _Say()
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerstream-soak-")))
    printed_to = chosen.log or LOG
    printed_to.parent.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context(printed_to.open("w", encoding="utf-8"))
    model = tiny_model(root / "model")

    def printed(line: str) -> None:
        print(line, file=log, flush=True)
        tally.printed(line)

    say("computing the answers without the connector")
    plain = EngineLife(model, options=None, arguments=ENGINE | {"enable_prefix_caching": False}, printed=printed)
    try:
        plain.wait_ready()
        corpus = make_corpus(chosen.seed, Shape(), plain.ask)
    finally:
        plain.kill()
    say(f"{len(corpus.turns)} prompts of {sum(len(turn.prompt) for turn in corpus.turns)} tokens")
    disk = stack.enter_context(volume(root, mib=DISK_MIB))
    tiers: dict[str, dict[str, Any]] = {"disk": {"type": "disk", "path": str(disk.folder), "gib": CAP_GIB}}
    lives: list[EngineLife] = []

    def start(order: Sequence[str]) -> EngineLife:
        options = {**OPTIONS, "tiers": [tiers[name] for name in order]}
        life = EngineLife(model, options=options, arguments=ENGINE, printed=printed, unchecked=chosen.control)
        lives.append(life)
        return life

    faults = {"disk": disk.faults(lambda: session(lives[-1].pid) if lives else [])}
    if chosen.control:
        faults["disk"] = [fault for fault in faults["disk"] if fault.name == CONTROL_FAULT]
    else:
        real = stack.enter_context(services(root))
        tiers |= real.tiers
        faults |= {"mooncake": real.mooncake_faults(), "lmcache": real.lmcache_faults()}
    stack.callback(lambda: [life.kill() for life in lives])  # type: ignore[func-returns-value]
    misfortunes = [
        Misfortune(
            what, these, seed=str(chosen.seed), tally=tally, **({} if what == "disk" else {"peace": REMOTE_PEACE_S})
        )
        for what, these in faults.items()
    ]
    watch = Watch(tally, used_bytes=disk.used_bytes, cap_bytes=int(CAP_GIB * (1 << 30)), services=is_lmcache)
    tally.begun = time.monotonic()
    Soak(
        Plan(seconds=chosen.minutes * 60, seed=chosen.seed),
        corpus=corpus,
        start=start,
        tiers=list(tiers),
        misfortunes=misfortunes,
        spared=misfortunes[0],
        unfinished=disk.unfinished,
        tally=tally,
        watch=watch,
        said=say,
    ).run()
    watch.stop()
    tally.notes |= {
        "largest growth of an engine, MiB": round(watch.largest_growth / MIB),
        "memory of each engine every 10 s, MiB": watch.memory_mib,
        "largest folder, MiB": round(watch.largest_folder / MIB, 1),
        "disk tier on a filesystem of its own": disk.mounted,
    }
    wanted = [fault.name for these in faults.values() for fault in these]
    tally.judge(tiers=list(tiers), faults=wanted if chosen.control else [*wanted, "engine: killed", "engine: stopped"])
    return len(corpus.turns)


class _Say:
    """Prints with the time."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{(time.monotonic() - self._begun) / 60:6.1f} min  {text}", flush=True)


def _import_from_checkout() -> None:
    """Make `tests` mean the checkout's: it is not installed, and others' packages are called so too."""
    if str(ROOT / "tests") not in getattr(sys.modules.get("tests"), "__path__", ()):
        package = types.ModuleType("tests")
        package.__path__ = [str(ROOT / "tests")]
        sys.modules["tests"] = package


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiles.soak", description="Serve while everything goes wrong.")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no engine after that many; 10 unless given")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--log", type=Path, help="file for what the engines print; out/soak.log unless given")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked and what goes wrong")
    parser.add_argument("--control", action="store_true", help="show that wrong bytes are seen: do not check them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
