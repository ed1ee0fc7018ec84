"""Whole vLLM engines with tiers: hits that come from a tier, and what tiers cost that are dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from layerstream.hooks.vllm.local_engine import Answer
from layerstream.hooks.vllm.register import NAME
from profiles.microbench.engine_process import EngineProcess, EngineSpec
from profiles.microbench.machine import busy_cores
from profiles.microbench.promoting import Promoting, promoting
from profiles.microbench.results import Results, Row, Target
from profiles.microbench.rig import BLOCK_TOKENS
from profiles.microbench.turns import Prompts, compare, compare_all, connector_hit, milliseconds, same_fresh_prompt
from tests.rigs.mooncake_service import free_port

pytestmark = pytest.mark.engine

POOL_GIB = 2.0
DEAD_PROMPT_TOKENS, DEAD_TOKENS = 500, 33


@pytest.fixture(scope="module")
def spec(model: Path, prompt_tokens: int) -> Callable[..., EngineSpec]:
    longest = max(prompt_tokens, DEAD_PROMPT_TOKENS + DEAD_TOKENS) + BLOCK_TOKENS
    return partial(EngineSpec, model=str(model), max_model_len=longest, connector=NAME)


@pytest.fixture(scope="module")
def rig(
    model: Path,
    spec: Callable[..., EngineSpec],
    fresh: Prompts,
    prompt_tokens: int,
    logs: Path,
    results: Results,
    say: Callable[[str], None],
) -> Iterator[Promoting]:
    say("starting engine 'promoting' and the tiers' services")
    with promoting(model, spec, fresh, prompt_tokens, logs) as rig:
        results.settings |= {f"{what} of the engines": value for what, value in rig.engine.setup.items()}
        yield rig


@pytest.mark.parametrize("tier", ["disk", "Mooncake", "LMCache"])
def test_a_hit_from_a_tier(
    tier: str, rig: Promoting, fresh: Prompts, max_pairs: int, results: Results, say: Callable[[str], None]
) -> None:
    row = Row(name=f"TTFT from {tier} / from the host pool")
    if reason := rig.missing.get(tier):
        row.failure = f"not run: {reason}"
        results.add(row)
        pytest.skip(row.failure)
    rig.hold_only_in(tier)
    in_pool = 0
    hits: dict[str, set[int]] = {"tier": set(), "pool": set()}

    def hit(source: str) -> float:
        answer = connector_hit(rig.engine, rig.prompts[in_pool])
        hits[source].add(answer.cached_tokens)
        return answer.seconds

    def from_tier() -> float:
        # The pool has room for one prompt: the one that was served last has pushed this one out.
        nonlocal in_pool
        in_pool = 1 - in_pool
        return hit("tier")

    def from_pool() -> float:
        return hit("pool")

    for side in (from_tier, from_pool, from_tier, from_pool):
        side()
    # Of the first, the pool may have had either prompt.
    hits = {"tier": set(), "pool": set()}
    before = rig.promoted(tier, fresh(BLOCK_TOKENS // 2))
    compare(row, from_tier, from_pool, max_pairs, say)
    after = rig.promoted(tier, fresh(BLOCK_TOKENS // 2))
    blocks, mb = ((now - then) / len(row.pairs) for now, then in zip(after, before, strict=True))
    slow, quick = milliseconds(row.pairs)
    row.note = (
        f"{slow} against {quick} (medians); of {len(rig.prompts[0])} tokens {some(hits['tier'])} were hit in the tier, "
        f"{some(hits['pool'])} in the pool; {mb:.1f} MB came from the tier"
    )
    results.add(row)
    assert 0 not in hits["tier"] | hits["pool"]
    assert blocks * BLOCK_TOKENS == max(hits["tier"]) == min(hits["tier"])


def some(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def test_serving_with_dead_tiers(
    spec: Callable[..., EngineSpec],
    fresh: Prompts,
    max_pairs: int,
    logs: Path,
    results: Results,
    say: Callable[[str], None],
) -> None:
    names = ("cold TTFT, dead tiers / no tiers", "decode time per token, dead tiers / no tiers")
    rows = [Row(name=name, target=Target(relation="<=", value=1.02)) for name in names]
    dead = [
        {"type": "mooncake", "master": f"127.0.0.1:{free_port()}"},
        {"type": "lmcache", "url": f"tcp://127.0.0.1:{free_port()}"},
    ]
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> EngineProcess:
            say(f"starting engine {name!r}")
            engine = stack.enter_context(EngineProcess(name, spec(options={"host_gib": POOL_GIB, **options}), logs))
            for _ in range(2):
                engine.serve(fresh(DEAD_PROMPT_TOKENS), tokens=DEAD_TOKENS)
            return engine

        engines = {"no tiers": start("no-tiers"), "dead tiers": start("dead-tiers", tiers=dead)}
        time.sleep(2.0)
        idle = {name: busy_cores(engine.pid, 3.0) for name, engine in engines.items()}
        with_dead, without = same_fresh_prompt(fresh, DEAD_PROMPT_TOKENS, tokens=DEAD_TOKENS)
        compare_all(
            rows,
            lambda: ttft_and_decode(with_dead(engines["dead tiers"])),
            lambda: ttft_and_decode(without(engines["no tiers"])),
            max_pairs,
            say,
        )
    notes = (
        f"a fresh prompt of {DEAD_PROMPT_TOKENS} tokens for each pair: what its request took without its decode steps; "
        "neither Mooncake's master nor LMCache's server is there; cores busy in idle engines: "
        + ", ".join(f"{name} {busy:.2f}" for name, busy in idle.items()),
        f"{DEAD_TOKENS - 1} tokens after the same prompts, by the engine's clock",
    )
    for row, note in zip(rows, notes, strict=True):
        ours, theirs = milliseconds(row.pairs)
        row.note = f"{ours} against {theirs} (medians); {note}"
        results.add(row)


def ttft_and_decode(answer: Answer) -> tuple[float, float]:
    assert answer.decode_seconds is not None
    assert len(answer.token_ids) == DEAD_TOKENS
    return answer.seconds - answer.decode_seconds, answer.decode_seconds / (DEAD_TOKENS - 1)
