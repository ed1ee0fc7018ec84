"""Eviction policies compared: `python -m profiles.policies --trace FILE [--out FOLDER] [--jobs N]`

FILE is the trace of a production chat service that was published with Mooncake
(github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl, Apache-2.0). The other workload is
`profiles.policies.workload` with its default seed. Pools hold so many blocks of 512 tokens, each of them a chunk.
Policies that the product has are served by `BlockPool`, the others by the product's index.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerstream.capacity import kv_capacity
from layerstream.picture import draw_pools
from profiles.microbench.machine import commit, describe_machine, versions
from profiles.policies.comparison import MODEL, NAMES, compare
from profiles.policies.workload import BLOCK_TOKENS, write

ROOT = Path(__file__).parents[2]
SIZES = (1_000, 2_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000)
REQUESTS = 20_000
"""Of the made-up workload."""


def table(workload: dict[str, Any]) -> str:
    """Hit rate and saved prefill in %, a pool a line, in Markdown."""
    cells = {(row["policy"], row["blocks"]): row for row in workload["rows"]}
    sizes = sorted({row["blocks"] for row in workload["rows"]})
    lines = []
    for what, title in (("hit", "tokens hit, %"), ("saved", "prefill saved, %")):
        lines += [f"| {title}, pool of | {' | '.join(NAMES)} |", "|---|" + "---:|" * len(NAMES)]
        for slots in sizes:
            values = [100 * cells[name, slots][what] for name in NAMES]
            best = max(values[:-1])
            shown = [
                f"**{value:.1f}**" if round(value, 1) == round(best, 1) else f"{value:.1f}" for value in values[:-1]
            ]
            lines.append(f"| {slots:,} blocks | {' | '.join([*shown, f'{values[-1]:.1f}'])} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="profiles.policies", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--trace", type=Path, required=True, help="the published trace")
    parser.add_argument("--out", type=Path, default=Path("out/policies"), help="folder for the results")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of the pools")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of the made-up workload")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    machine, code = describe_machine(), commit(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        mixed = Path(folder) / "mixed.jsonl"
        write(mixed, requests=options.requests)
        found = {
            name: compare(path, sizes=options.sizes, jobs=options.jobs)
            for name, path in (("conversations", options.trace), ("mixed", mixed))
        }
    token_bytes = kv_capacity(MODEL).token_bytes
    run = {
        "commit": code,
        "machine": machine,
        "versions": versions(),
        "block tokens": BLOCK_TOKENS,
        "block MiB of the model": BLOCK_TOKENS * token_bytes / 2**20,
        "workloads": found,
    }
    (options.out / "policies.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    text = [f"# Eviction policies, commit {code}", ""]
    text += [f"{key}: {value}  " for key, value in (*machine.items(), *versions().items())]
    for name, workload in found.items():
        text += [
            "",
            f"## {name}: {workload['requests']:,} requests, {workload['blocks']:,} blocks",
            "",
            table(workload),
        ]
        draw_pools(
            {
                policy: [
                    (row["blocks"], row["hit"], row["saved"]) for row in workload["rows"] if row["policy"] == policy
                ]
                for policy in NAMES
            },
            options.out / f"{name}.png",
            title=f"{name}: {workload['requests']:,} requests",
            unit=("blocks of 512 tokens in the pool, in thousands", 1000),
        )
    (options.out / "policies.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
