"""What one engine measures: `python -m profiles.gpu_serve.session SPEC OBSERVATIONS`.

Observations go to the file as they are made. A part that fails is written down, and the next one is tried.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layerstream.hooks.vllm.local_engine import Answer, LocalEngine
from layerstream.hooks.vllm.register import NAME
from layerstream.trials import alternate
from profiles.gpu_serve.observations import CASES, HALF, LAST, WHOLE, Case, Kind, Observation
from profiles.gpu_serve.plan import ANSWER_TOKENS, EXACT_PROMPTS, SystemSpec
from profiles.gpu_serve.probe import PROBE

SETTLE_S = 0.2
"""Pause before a timed request: saves of the request before it go on after its answer."""
PATIENCE_S = 20.0
"""Longest wait for something that is due within milliseconds."""
TOP_LOGPROBS = 5
NUDGE = (100, 101, 102, 103)
"""A prompt shorter than a block. Serving it steps the engine, which may learn only then that a transfer has ended."""
FIRST_TOKEN_ID = 100
"""The first ids of a vocabulary are special tokens."""


class Session:
    """One engine and the observations made on it."""

    def __init__(self, engine: LocalEngine, spec: SystemSpec, write: Callable[[Observation], None]) -> None:
        self.engine, self.spec, self._write = engine, spec, write
        self._block = engine.block_tokens
        self._streams = spec.connector == NAME

    def measure(self) -> None:
        """Everything the spec asks for; what matters most and takes least comes first."""
        self._part("decode", "", self.spec.decode_prompt, self.decode)
        for tokens in self.spec.lengths:
            self._part("cold", "", tokens, self.cold)
            if self.spec.connector is None:
                self._part("hit", WHOLE, tokens, self.own_hits)
                continue
            for case in CASES:
                self._part("hit", case, tokens, partial(self.hits, case))
            for case in (WHOLE, LAST):
                if self._streams:
                    self._part("exact", case, tokens, partial(self.exact, case))

    def _part(self, kind: Kind, case: Case, tokens: int, part: Callable[[int], None]) -> None:
        try:
            part(tokens)
        except Exception as error:  # noqa: BLE001 - whatever it was, the table says it and the rest is measured
            traceback.print_exc()
            self._add("failed", case, tokens, part=kind, reason=f"{type(error).__name__}: {error}")

    def _add(self, kind: Kind, case: Case, tokens: int, number: int = 0, value: float = 0.0, **detail: Any) -> None:
        self._write(Observation(kind=kind, case=case, tokens=tokens, round=number, value=value, detail=detail))

    def prompt(self, *key: object, tokens: int) -> list[int]:
        """Token ids that depend on `key` alone, so that every system serves the same."""
        source = random.Random("/".join(map(str, key)))
        return source.choices(range(FIRST_TOKEN_ID, self.spec.vocabulary), k=tokens)

    def length(self, case: Case, tokens: int) -> int:
        """Tokens of the prompt of a case."""
        return (tokens - 1) // self._block * self._block + 1 if case == LAST else tokens

    def cold(self, tokens: int) -> None:
        """New prompts; the first is not counted, as kernels are compiled and caches grow under it."""
        for number in range(-1, self.spec.rounds):
            time.sleep(SETTLE_S)
            answer = self.engine.serve(self.prompt("cold", tokens, number, tokens=tokens))
            if answer.cached_tokens:
                raise RuntimeError(f"{answer.cached_tokens} tokens of a new prompt were cached")
            if number >= 0:
                self._add("cold", "", tokens, number, answer.seconds)

    def decode(self, tokens: int) -> None:
        """Time a token of single requests, by the engine's clock; the first is not counted."""
        count = self.spec.decode_tokens
        for number in range(-1, self.spec.rounds):
            time.sleep(SETTLE_S)
            answer = self.engine.serve(self.prompt("decode", number, tokens=tokens), tokens=count)
            if answer.decode_seconds is None or len(answer.token_ids) != count:
                raise RuntimeError(f"{len(answer.token_ids)} of {count} tokens were generated, and when is unknown")
            if number >= 0:
                self._add("decode", "", tokens, number, answer.decode_seconds / (count - 1))

    def hits(self, case: Case, tokens: int) -> None:
        """Alternating hits in vLLM's own cache and through the connector."""
        length = self.length(case, tokens)
        known = (length // 2 if case == HALF else length - 1) // self._block * self._block
        if known == 0:
            raise RuntimeError(f"{length} tokens leave no whole block to be hit")
        first = self.prompt("hit", case, tokens, tokens=length)
        sent = 0

        def prompt() -> list[int]:
            # Half a prompt that is new each time, or the connector would know it the second time.
            nonlocal sent
            sent += 1
            return first[:known] + self.prompt("tail", case, tokens, sent, tokens=length - known)

        ask = prompt if case == HALF else lambda: first
        self.engine.serve(ask())
        found = self._until_hit(ask, known)
        self._take_moved(wait=True)
        pairs = alternate(
            lambda: self._connector_hit(ask(), found), lambda: self._own_hit(ask(), known), self.spec.rounds
        )
        for number, ((hit, moved), own) in enumerate(pairs):
            self._add("hit", case, tokens, number, hit.seconds, cached_tokens=hit.cached_tokens)
            self._add("own", case, tokens, number, own.seconds, cached_tokens=own.cached_tokens)
            if moved.get("load_blocks"):
                self._add("moved", case, tokens, number, moved["load_seconds"], **moved)

    def own_hits(self, tokens: int) -> None:
        """Hits in vLLM's own cache of the prompt that engines with a connector hit too."""
        prompt = self.prompt("hit", WHOLE, tokens, tokens=tokens)
        self.engine.serve(prompt)
        for number in range(self.spec.rounds):
            own = self._own_hit(prompt, (tokens - 1) // self._block * self._block)
            self._add("own", WHOLE, tokens, number, own.seconds, cached_tokens=own.cached_tokens)

    def exact(self, case: Case, tokens: int) -> None:
        """Whether logprobs of a loaded prefix equal those of the computed one, and whether they would tell."""
        length = self.length(case, tokens)
        known = (length - 1) // self._block * self._block
        for number in range(EXACT_PROMPTS):
            prompt = self.prompt("exact", case, tokens, number, tokens=length)
            self._serve_long(prompt)
            # vLLM's own hit comes first: later its cache holds what was loaded.
            own = self._serve_long(prompt)
            self._check(own, known, "vLLM's own cache")
            hit = self._loaded(prompt, known)
            equal = (hit.token_ids, hit.logprobs) == (own.token_ids, own.logprobs)
            self._add("exact", case, tokens, number, float(equal))
            other = self._serve_long(self.prompt("other", case, tokens, number, tokens=known) + prompt[known:], count=1)
            differs = other.logprobs[0] != own.logprobs[0]
            self._add("sensitive", case, tokens, number, float(differs))

    def _loaded(self, prompt: Sequence[int], known: int) -> Answer:
        """The first answer for which the connector loaded all it can."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(SETTLE_S)
            self.forget()
            answer = self._serve_long(prompt)
            if answer.cached_tokens == known:
                return answer
            if time.monotonic() > deadline:
                self._check(answer, known, "the connector")

    def _serve_long(self, prompt: Sequence[int], *, count: int = ANSWER_TOKENS) -> Answer:
        answer = self.engine.serve(prompt, tokens=count, logprobs=TOP_LOGPROBS)
        if len(answer.logprobs) != count:
            raise RuntimeError(f"{len(answer.logprobs)} of {count} tokens came with logprobs")
        return answer

    def _until_hit(self, ask: Callable[[], Sequence[int]], known: int) -> int:
        """Ask until the connector hits what it has saved; returns the tokens hit: all that are `known` for LayerStream,
        for others also fewer, once the number stays the same."""
        deadline = time.monotonic() + PATIENCE_S
        before = 0
        while True:
            time.sleep(SETTLE_S)
            self.forget()
            answer = self.engine.serve(ask())
            steady = not self._streams and answer.cached_tokens == before > 0
            if answer.cached_tokens == known or steady:
                return answer.cached_tokens
            before = answer.cached_tokens
            if time.monotonic() > deadline:
                self._check(answer, known, "the connector")

    def _connector_hit(self, prompt: Sequence[int], known: int) -> tuple[Answer, dict[str, float]]:
        self.forget()
        time.sleep(SETTLE_S)
        answer = self.engine.serve(prompt)
        self._check(answer, known, "the connector")
        return answer, self._take_moved(wait=True)

    def _own_hit(self, prompt: Sequence[int], known: int) -> Answer:
        time.sleep(SETTLE_S)
        answer = self.engine.serve(prompt)
        self._check(answer, known, "vLLM's own cache")
        return answer

    def _take_moved(self, *, wait: bool = False) -> dict[str, float]:
        """What LayerStream's worker half reported since the last call; with `wait`, once it holds a load."""
        if not self._streams:
            return {}
        total: dict[str, float] = {}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            taken: dict[str, float] = self.engine.llm.collective_rpc("probe_take")[0]
            total = {name: total.get(name, 0.0) + value for name, value in taken.items()}
            if not wait or total["load_blocks"]:
                return total
            if time.monotonic() > deadline:
                raise RuntimeError(f"the load was not reported within {PATIENCE_S:g} s")
            self.nudge()

    def nudge(self) -> None:
        """Step the engine without touching a block that counts."""
        self.engine.serve(NUDGE)

    def forget(self) -> None:
        """Clear vLLM's own prefix cache, not the connector's.

        Raises:
            RuntimeError: blocks are still in use long after the last request.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self.engine.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's prefix cache could not be cleared within {PATIENCE_S:g} s")
            self.nudge()

    def _check(self, answer: Answer, known: int, where: str) -> None:
        if answer.cached_tokens != known:
            raise RuntimeError(f"{where} held {answer.cached_tokens} tokens instead of {known}")


def main(arguments: Sequence[str]) -> int:
    """Start the engine, measure, end it."""
    spec, file = SystemSpec.from_json(arguments[0]), Path(arguments[1])
    begun = time.monotonic()
    engine = LocalEngine(
        Path(spec.model),
        max_model_len=spec.max_model_len,
        connector=spec.connector,
        options=spec.options,
        worker_extension_cls=PROBE,
        **spec.arguments,
    )
    rpc: Callable[..., list[Any]] = engine.llm.collective_rpc
    facts = rpc("probe_engine")[0] | {"dtype": engine.dtype, "block tokens": engine.block_tokens}
    if spec.dummy:
        rpc("probe_fill", args=(0,))
    if spec.connector == NAME:
        rpc("probe_watch")
    facts["started in s"] = round(time.monotonic() - begun, 1)
    Observation(kind="engine", detail=facts).append(file)
    Session(engine, spec, lambda seen: seen.append(file)).measure()
    engine.close()
    Observation(kind="end", detail={"seconds": round(time.monotonic() - begun, 1)}).append(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
