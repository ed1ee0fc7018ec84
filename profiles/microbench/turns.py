"""How engines take turns: hits of either kind, pairs that alternate, and when they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median

from layerstream.hooks.vllm.local_engine import Answer
from layerstream.trials import alternate
from profiles.microbench.engine_process import EngineFailed, EngineProcess
from profiles.microbench.results import Row

PROMPT_TOKENS = 4000
"""Of the prompts that are hit, unless the run is scaled down."""
LOOKS = (10, 20)
"""Pairs after which a comparison ends if its verdict is clear. Few, as each look is another chance of a wrong one."""
SETTLE_S = 0.2
"""Pause before a timed request: saves of the request before it go on after its answer."""
HIT_TRIES = 50
WARM_UP = 2
"""Times that both sides of a comparison of rates run before it."""

Prompts = Callable[[int], list[int]]
"""Makes a prompt of so many tokens."""


def serve_until_hit(engine: EngineProcess, prompt: Sequence[int]) -> int:
    """Serve a prompt until the connector has saved it and it is hit with vLLM's own cache cleared.

    Returns:
        The tokens hit; the prompt is in vLLM's own cache as well.

    Raises:
        EngineFailed: it is never hit.
    """
    engine.serve(prompt)
    for _ in range(HIT_TRIES):
        time.sleep(SETTLE_S)
        if cached := connector_hit(engine, prompt).cached_tokens:
            return cached
    raise EngineFailed(f"engine {engine.name!r} does not hit what it has saved", engine.log)


def local_hit(engine: EngineProcess, prompt: Sequence[int]) -> Answer:
    """A hit in vLLM's own prefix cache, which holds the prompt from the request before."""
    time.sleep(SETTLE_S)
    return engine.serve(prompt)


def connector_hit(engine: EngineProcess, prompt: Sequence[int]) -> Answer:
    """A hit that only the connector can serve."""
    engine.forget()
    time.sleep(SETTLE_S)
    return engine.serve(prompt)


def compare(
    row: Row, first: Callable[[], float], second: Callable[[], float], max_pairs: int, say: Callable[[str], None]
) -> Row:
    """Fill a row with alternating pairs until its verdict is clear at one of `LOOKS`, or `max_pairs` are done."""
    compare_all([row], lambda: [first()], lambda: [second()], max_pairs, say)
    return row


def compare_all(
    rows: Sequence[Row],
    first: Callable[[], Sequence[float]],
    second: Callable[[], Sequence[float]],
    max_pairs: int,
    say: Callable[[str], None],
) -> None:
    """`compare` for several rows at once: each side gives a number for each of them, and all verdicts must be clear.
    Without a target, there is nothing to wait for."""
    for sides in alternate(first, second, max_pairs):
        for row, *pair in zip(rows, *sides, strict=True):
            row.pairs.append((pair[0], pair[1]))
            row.samples.append(pair[0] / pair[1])
        if len(rows[0].pairs) in LOOKS and all(row.verdict() in {"met", "missed", "-"} for row in rows):
            break
    for row in rows:
        say(f"{row.name}: {row.measured()}, {row.verdict()}, {len(row.pairs)} pairs")


def compare_rates(
    row: Row,
    theirs: Callable[[], float],
    ours: Callable[[], float],
    max_pairs: int,
    say: Callable[[str], None],
    *,
    nbytes: int,
    note: str,
) -> Row:
    """`compare` our rate with theirs, after a warm-up. Each side gives the seconds that it took for `nbytes` bytes."""
    for _ in range(WARM_UP):
        theirs()
        ours()
    # More is better of rates and less of seconds, so theirs come first.
    compare(row, theirs, ours, max_pairs, say)
    plain, measured = (nbytes / median(side) / 1e9 for side in zip(*row.pairs, strict=True))
    row.note = f"{measured:.2f} GB/s against {plain:.2f} GB/s (medians), {nbytes / 1e6:.1f} MB; {note}"
    return row


def milliseconds(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """The median of each side."""
    firsts, seconds = zip(*pairs, strict=True)
    return f"{median(firsts) * 1e3:.1f} ms", f"{median(seconds) * 1e3:.1f} ms"


def same_fresh_prompt(
    fresh: Prompts, length: int, *, tokens: int
) -> tuple[Callable[[EngineProcess], Answer], Callable[[EngineProcess], Answer]]:
    """Two sides that each serve a new prompt on every call; the n-th calls of both, in any order, serve the same."""
    prompts: list[list[int]] = []

    def side() -> Callable[[EngineProcess], Answer]:
        turns = itertools.count()

        def serve(engine: EngineProcess) -> Answer:
            turn = next(turns)
            if turn == len(prompts):
                prompts.append(fresh(length))
            time.sleep(SETTLE_S)
            answer = engine.serve(prompts[turn], tokens=tokens)
            assert answer.cached_tokens == 0
            return answer

        return serve

    return side(), side()
