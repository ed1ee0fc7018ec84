"""An engine without vLLM (`examples/mini_engine.py`): time to the first token, overlap, stalls, and equal logits."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from layerstream.jobs import JobKind, StepPlan
from layerstream.metrics import TransferStats
from layerstream.trials import alternate
from profiles.gpu_validate.bench import Bench, prepare_spin, spin, wait_for
from profiles.gpu_validate.machine import ROOT
from profiles.gpu_validate.rows import Row, failed, right
from profiles.gpu_validate.world import PIN_S

BLOCK_TOKENS = 16
TAILS = (256, 512, 1024, 2048)
BALANCE = 1.2
"""So much longer than its load a layer's compute is, where a tail allows that."""
BEHIND_S = 0.02
"""Length of the step that still runs when a load is submitted behind it."""


@functools.cache
def example(name: str) -> Any:
    """A module of the examples, which import each other as scripts do."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


@contextmanager
def engine(bench: Bench, *, graphs: bool, options: dict[str, object]) -> Iterator[tuple[Any, list[int]]]:
    """An engine that has served a prompt cold, and the prompt. On a GPU a Llama-8B with a small vocabulary."""
    mini, llama = example("mini_engine"), example("mini_llama")
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "vocab": 32000}
    shape = llama.LlamaShape(**sizes) if bench.sized(1, 0) else llama.LlamaShape()
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    model = llama.MiniLlama.random(shape, seed=1, device=bench.place, dtype=dtype)
    tokens = bench.sized(8192, 96)
    made = mini.MiniEngine(
        model,
        num_blocks=2 * -(-tokens // BLOCK_TOKENS) + 8,
        block_tokens=BLOCK_TOKENS,
        step_tokens=bench.sized(2048, 64),
        graphs=graphs,
        options={"host_gib": 3.0 if bench.sized(1, 0) else 0.05, **options},
    )
    try:
        made.streamer.pool.start_pinning()
        wait_for(lambda: made.streamer.pool.final, PIN_S)
        generator = np.random.default_rng(1)
        # The second prompt is served after kernels are compiled and hooks known.
        for _ in range(2):
            prompt = generator.integers(0, shape.vocab, tokens).tolist()
            made.serve_cold(prompt)
        yield made, prompt
    finally:
        made.close()


def balanced_tail(bench: Bench, made: Any, prompt: list[int]) -> tuple[int, str]:
    """The shortest tail whose compute hides a load, and what was found for it."""
    if not bench.sized(1, 0):
        return 16, ""
    layers = made.model.shape.layers
    for tail in TAILS:
        made.serve_local_hit(prompt, tail_tokens=tail)
        compute = made.serve_local_hit(prompt, tail_tokens=tail).seconds / layers
        moved = made.serve_warm(prompt, tail_tokens=tail).stats
        load = moved.load_seconds / layers
        found = f"tail {tail} tokens, compute {compute * 1e3:.2f} ms a layer, load {load * 1e3:.2f} ms"
        if compute >= BALANCE * load:
            return tail, found
    return tail, f"{found}: no tail tried computes longer than its load"


def served(way: str, options: dict[str, object], *, graphs: bool) -> Callable[[Bench], Iterator[Row]]:
    """The check of one way to run."""

    def check(bench: Bench) -> Iterator[Row]:
        with engine(bench, graphs=graphs, options=options) as (made, prompt):
            tail, found = balanced_tail(bench, made, prompt)
            local = functools.partial(made.serve_local_hit, prompt, tail_tokens=tail)
            warm = functools.partial(made.serve_warm, prompt, tail_tokens=tail)
            # What was loaded stays in the cache, so the logits that all must equal come before any load.
            made.forget()
            cold, truth = made.serve_cold(prompt).seconds, local().logits
            warm()
            pairs = list(alternate(warm, local, bench.rounds))
            differ = sum(not torch.equal(each.logits, truth) for pair in pairs for each in pair)
            yield right(
                f"{way}: logits equal those of a local hit, bit for bit",
                [f"{differ} of {2 * len(pairs)} differ"] if differ else [],
            )
            yield Row.of_pairs(
                f"{way}: warm time to first token / local hit's",
                [(a.seconds, b.seconds) for a, b in pairs],
                target=bench.for_gpu("<=", 1.03),
                note=f"{pairs[0][0].hit_tokens} tokens hit, {found}".removesuffix(", "),
            )
            yield Row(name=f"{way}: cold time to first token", samples=[cold], unit="ms", scale=1e3, digits=1)
            stats = [a.stats for a, _ in pairs]
            yield Row(
                name=f"{way}: overlap ratio",
                samples=[overlap(each) for each in stats],
                target=bench.for_gpu(">=", 0.95),
                note=found,
            )
            stalls = [each.stall_seconds for each in stats]
            yield Row(name=f"{way}: exposed stall of a load", samples=stalls, unit="ms", scale=1e3, digits=2)

    return check


def overlap(stats: TransferStats) -> float:
    """The overlap ratio of a gated load."""
    ratio = stats.overlap_ratio
    return 0.0 if ratio is None else ratio


def loads_stage_ahead(bench: Bench) -> Iterator[Row]:
    """What the first layer waits for if its bytes came while an earlier step ran: about one scatter."""
    prepare_spin(bench)
    with engine(bench, graphs=False, options={"transfer_path": "staged"}) as (made, prompt):
        tail, request = bench.sized(512, 16), made.requests[-1]
        hit = made._hit(request, tail)
        made.serve_warm(prompt, tail_tokens=tail)
        pairs: list[tuple[float, float]] = []
        for _ in range(bench.rounds):
            stall, load = staged_step(bench, made, request, hit)
            pairs.append((max(stall, 1e-9), load / made.model.shape.layers))
        typical = float(np.median([stall for stall, _ in pairs]))
        yield Row.of_pairs(
            "layer 0's stall behind a running step / a layer's load",
            pairs,
            target=bench.for_gpu("<=", 0.25),
            note=f"{typical * 1e3:.3f} ms: its bytes were in the ring, and one scatter was left to do",
        )


def staged_step(bench: Bench, made: Any, request: Any, hit: int) -> tuple[float, float]:
    """A warm step behind a step that still runs: the first layer's stall, and the seconds of the whole load."""
    batch = example("mini_batch")
    made.drain()
    made.wipe(request)
    request.computed = hit
    inputs, _ = batch.batch_inputs([(request, len(request.tokens) - hit)], made.block_tokens)
    tensors = {name: made._upload(each) for name, each in inputs.items()}
    bench.finish()
    if bench.cuda:
        spin(BEHIND_S)
    streamer = made.streamer
    job = made._job(JobKind.LOAD, request, 0, hit // made.block_tokens)
    made._steps += 1
    streamer.begin_step(StepPlan(step=made._steps, jobs=(job,)))
    streamer.start_loads(layerwise=True)
    made.module(**tensors)
    transfer = streamer._gated
    streamer.end_step()
    request.computed = len(request.tokens)
    stats = made.drain()
    return streamer.device.elapsed(*transfer.parts[0].gate), stats.load_seconds


def steps_beside_other_loads(bench: Bench) -> Iterator[Row]:
    """A step of one request while another one's parked load runs, and without."""
    with engine(bench, graphs=False, options={}) as (made, prompt):
        other, request = made.requests[-2:]
        tail = bench.sized(512, 16)
        hit = made._hit(request, tail)
        made.serve_local_hit(prompt, tail_tokens=tail)

        def step(*, beside: bool) -> float:
            made.drain()
            request.computed = hit
            job = made._job(JobKind.PARKED_LOAD, other, 0, other.saved_blocks) if beside else None
            bench.finish()
            begun = time.perf_counter()
            logits = made.step([(request, tail)], load=job)
            float(logits[0, 0])
            return time.perf_counter() - begun

        step(beside=True)
        pairs = list(alternate(lambda: step(beside=True), lambda: step(beside=False), bench.rounds))
        nbytes = made.drain().load_bytes
        if not nbytes:
            yield failed("step beside another request's load / alone", "nothing was loaded")
            return
        yield Row.of_pairs(
            "step beside another request's load / alone",
            pairs,
            note=f"{tail} tokens of {hit + tail}; {other.saved_blocks} blocks are loaded meanwhile",
        )
