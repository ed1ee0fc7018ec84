"""Whole vLLM engines on one long prompt: LayerStream against vLLM's own prefix cache, no connector, and LMCache.

Every engine computes on the same core, one at a time, and differs from the others in its connector alone. Assertions
are about what was hit and computed; how fast it was is for the verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from layerstream.hooks.vllm.local_engine import Answer
from layerstream.hooks.vllm.register import NAME
from layerstream.timeline import read_timeline
from profiles.microbench.engine_process import EngineFailed, EngineProcess, EngineSpec
from profiles.microbench.lmcache_server import LMCacheServer
from profiles.microbench.machine import busy_cores
from profiles.microbench.results import Results, Row, Target
from profiles.microbench.rig import BLOCK_TOKENS
from profiles.microbench.turns import (
    Prompts,
    compare,
    connector_hit,
    local_hit,
    milliseconds,
    same_fresh_prompt,
    serve_until_hit,
)

pytestmark = pytest.mark.engine

QUIET_CORES = 0.05
"""Share of a core below which an idle engine leaves the others alone."""
EXACT_PROMPTS, EXACT_TOKENS, EXACT_LOGPROBS = 3, 16, 5
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 1000, 65
POOL_GIB, LMCACHE_GIB = 2.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """What takes turns."""

    layerstream: EngineProcess
    plain: EngineProcess
    lmcache: EngineProcess | None
    lmcache_failure: str


@pytest.fixture(scope="module")
def max_model_len(prompt_tokens: int) -> int:
    return max(prompt_tokens + EXACT_TOKENS, DECODE_PROMPT_TOKENS + DECODE_TOKENS) + BLOCK_TOKENS


@pytest.fixture(scope="module")
def engines(
    model: Path,
    max_model_len: int,
    fresh: Prompts,
    prompt_tokens: int,
    logs: Path,
    results: Results,
    say: Callable[[str], None],
) -> Iterator[Engines]:
    spec = partial(EngineSpec, model=str(model), max_model_len=max_model_len)
    with ExitStack() as stack:

        def start(name: str, chosen: EngineSpec) -> EngineProcess:
            say(f"starting engine {name!r}")
            engine = stack.enter_context(EngineProcess(name, chosen, logs))
            for _ in range(2):
                prompt = fresh(prompt_tokens)
                if chosen.connector is None:
                    engine.serve(prompt)
                else:
                    serve_until_hit(engine, prompt)
            engine.serve(fresh(DECODE_PROMPT_TOKENS), tokens=4)
            return engine

        plain = start("plain", spec())
        layerstream = start("layerstream", spec(connector=NAME, options={"host_gib": POOL_GIB}))
        lmcache, failure, groups = None, "", {"plain": plain.pid, "layerstream": layerstream.pid}
        try:
            server = stack.enter_context(LMCacheServer(logs, gib=LMCACHE_GIB))
            options, environment = server.connector_options, server.environment
            lmcache = start("lmcache", spec(connector="LMCacheMPConnector", options=options, environment=environment))
            groups |= {"lmcache": lmcache.pid, "lmcache server": server.pid}
        except EngineFailed as error:
            failure = error.reason
            say(str(error))
        time.sleep(2.0)
        idle = {name: busy_cores(pid, 3.0) for name, pid in groups.items()}
        results.settings |= {f"{what} of the engines": value for what, value in plain.setup.items()}
        results.settings["cores busy in idle engines"] = ", ".join(f"{name} {busy:.2f}" for name, busy in idle.items())
        if loud := [name for name, busy in idle.items() if busy > QUIET_CORES]:
            say(f"idle, and yet busy: {', '.join(loud)}; what runs beside them is slowed down")
        yield Engines(layerstream=layerstream, plain=plain, lmcache=lmcache, lmcache_failure=failure)


def test_overlap_of_a_hit(
    model: Path,
    max_model_len: int,
    fresh: Prompts,
    prompt_tokens: int,
    max_pairs: int,
    logs: Path,
    tmp_path: Path,
    results: Results,
    say: Callable[[str], None],
) -> None:
    # An engine of its own: writing timelines takes time that other rows must not contain.
    spec = EngineSpec(
        model=str(model),
        max_model_len=max_model_len,
        connector=NAME,
        options={"host_gib": POOL_GIB, "trace_dir": str(tmp_path)},
    )
    say("starting engine 'traced'")
    prompt = fresh(prompt_tokens)
    with EngineProcess("traced", spec, logs) as engine:
        serve_until_hit(engine, prompt)
        warm_up = set(tmp_path.glob("load-*.json"))
        for _ in range(max_pairs):
            connector_hit(engine, prompt)
        # What a load reports is booked by a step after it.
        engine.serve(fresh(BLOCK_TOKENS))
    timelines = [read_timeline(path) for path in sorted(set(tmp_path.glob("load-*.json")) - warm_up)]
    assert len(timelines) >= max_pairs
    assert {timeline.blocks for timeline in timelines} == {(prompt_tokens - 1) // BLOCK_TOKENS}
    rate = median(timeline.nbytes / timeline.load_seconds for timeline in timelines)
    stall = median(timeline.stall_seconds for timeline in timelines)
    row = Row(
        name="overlap ratio of a hit",
        target=Target(relation=">=", value=0.95),
        samples=[timeline.overlap_ratio for timeline in timelines],
        note=f"from the events of every load: {timelines[0].nbytes / 1e6:.1f} MB at {rate / 1e9:.2f} GB/s, exposed "
        f"stall {stall * 1e3:.2f} ms (medians)",
    )
    results.add(row)
    say(f"{row.name}: {row.measured()}, {row.verdict()}")


def test_warm_ttft_against_vllms_own_prefix_hit(
    engines: Engines,
    fresh: Prompts,
    prompt_tokens: int,
    max_pairs: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    engine, prompt = engines.layerstream, fresh(prompt_tokens)
    hit = (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert serve_until_hit(engine, prompt) == hit

    def seconds(serve: Callable[[EngineProcess, Sequence[int]], Answer]) -> float:
        answer = serve(engine, prompt)
        assert answer.cached_tokens == hit
        return answer.seconds

    row = Row(name="warm TTFT / vLLM's own prefix hit", target=Target(relation="<=", value=1.03))
    compare(row, lambda: seconds(connector_hit), lambda: seconds(local_hit), max_pairs, say)
    warm, local = milliseconds(row.pairs)
    row.note = f"{hit} of {prompt_tokens} tokens hit; {warm} against {local} (medians), in one engine"
    results.add(row)


def test_logprobs_of_a_hit(engines: Engines, fresh: Prompts, prompt_tokens: int, results: Results) -> None:
    engine = engines.layerstream
    equal = []
    for _ in range(EXACT_PROMPTS):
        prompt = fresh(prompt_tokens)
        hit = serve_until_hit(engine, prompt)
        local = engine.serve(prompt, tokens=EXACT_TOKENS, logprobs=EXACT_LOGPROBS)
        engine.forget()
        warm = engine.serve(prompt, tokens=EXACT_TOKENS, logprobs=EXACT_LOGPROBS)
        assert warm.cached_tokens == local.cached_tokens == hit
        assert len(local.logprobs) == EXACT_TOKENS
        equal.append(float((warm.token_ids, warm.logprobs) == (local.token_ids, local.logprobs)))
    results.add(
        Row(
            name="logprobs bit-equal to those of vLLM's own hit (1: yes)",
            digits=0,
            target=Target(relation="=", value=1),
            samples=equal,
            note=f"all of {EXACT_TOKENS} tokens and the {EXACT_LOGPROBS} best logprobs of each are equal, per prompt",
        )
    )
    assert all(equal)


def test_warm_ttft_against_lmcache(
    engines: Engines,
    fresh: Prompts,
    prompt_tokens: int,
    max_pairs: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    row = Row(name="warm TTFT / LMCache multiprocess mode's", target=Target(relation="<=", value=0.45))
    lmcache = engines.lmcache
    if lmcache is None:
        row.failure = engines.lmcache_failure
        results.add(row)
        pytest.skip(row.failure)
    prompt = fresh(prompt_tokens)
    hits = {engine: serve_until_hit(engine, prompt) for engine in (engines.layerstream, lmcache)}

    def seconds(engine: EngineProcess) -> float:
        answer = connector_hit(engine, prompt)
        assert answer.cached_tokens == hits[engine]
        return answer.seconds

    compare(row, lambda: seconds(engines.layerstream), lambda: seconds(lmcache), max_pairs, say)
    ours, theirs = milliseconds(row.pairs)
    row.note = (
        f"{ours} against {theirs} (medians); {hits[engines.layerstream]} against {hits[lmcache]} tokens hit; LMCache's "
        "transfer mode is engine_driven over shared memory"
    )
    results.add(row)


def test_cold_ttft(
    engines: Engines,
    fresh: Prompts,
    prompt_tokens: int,
    max_pairs: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    saving, plain = same_fresh_prompt(fresh, prompt_tokens, tokens=1)
    row = Row(name="cold TTFT, saving / no connector", target=Target(relation="<=", value=1.03))
    compare(row, lambda: saving(engines.layerstream).seconds, lambda: plain(engines.plain).seconds, max_pairs, say)
    with_saving, without = milliseconds(row.pairs)
    row.note = f"{with_saving} against {without} (medians); a fresh prompt of {prompt_tokens} tokens for each pair"
    results.add(row)


def test_decode_time(
    engines: Engines, fresh: Prompts, max_pairs: int, results: Results, say: Callable[[str], None]
) -> None:
    saving, plain = same_fresh_prompt(fresh, DECODE_PROMPT_TOKENS, tokens=DECODE_TOKENS)

    def per_token(answer: Answer) -> float:
        assert answer.decode_seconds is not None
        assert len(answer.token_ids) == DECODE_TOKENS
        return answer.decode_seconds / (DECODE_TOKENS - 1)

    row = Row(name="decode time per token, connector / none", target=Target(relation="<=", value=1.01))
    compare(
        row, lambda: per_token(saving(engines.layerstream)), lambda: per_token(plain(engines.plain)), max_pairs, say
    )
    with_connector, without = milliseconds(row.pairs)
    row.note = (
        f"{with_connector} against {without} (medians); {DECODE_TOKENS - 1} tokens after a fresh prompt of "
        f"{DECODE_PROMPT_TOKENS}, by the engine's clock; blocks that fill are saved"
    )
    results.add(row)
