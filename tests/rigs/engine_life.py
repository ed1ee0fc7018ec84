"""A vLLM engine in a process of its own, that a test can end in any way: what outlives it is in tiers alone.

The process reads one request a line and answers each with a line, both JSON; what vLLM prints goes to a log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

START_S = 240.0
ANSWER_S = 120.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer."""

    cached_tokens: int
    token_ids: list[int]
    logprobs: list[dict[str, float]]
    seconds: float


class EngineLife:
    """From a start to an end. A context manager that ends what is still alive."""

    def __init__(self, model: Path, log: Path, *, tiers: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
        """
        Args:
            model: a model's folder.
            log: file that gets all that the engine prints.
            tiers: the option of that name.
            arguments: `options` of the connector beside `tiers`, and arguments of `LocalEngine`.
        """
        options = {"log_interval_s": 0.01, "recompute": "never", **arguments.pop("options", {}), "tiers": list(tiers)}
        setup = {"model": str(model), "options": options, "arguments": {"max_model_len": 4096, **arguments}}
        reading, writing = os.pipe()
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(setup), str(writing)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading, "rb")
        try:
            assert self._answer(START_S) == "ready"
        except BaseException:
            self.kill()
            raise

    def serve(self, prompt: Sequence[int], *, tokens: int = 4) -> Served:
        return self.serve_together([prompt], tokens=tokens)[0]

    def serve_together(self, prompts: Sequence[Sequence[int]], *, tokens: int = 4) -> list[Served]:
        self.begin(prompts, tokens=tokens)
        return self.end()

    def begin(self, prompts: Sequence[Sequence[int]], *, tokens: int = 4) -> None:
        """Let it serve without waiting for the answer."""
        self._ask({"serve": [list(prompt) for prompt in prompts], "tokens": tokens})

    def end(self) -> list[Served]:
        return [Served(**answer) for answer in self._answer(ANSWER_S)]

    def forget(self) -> None:
        """Clear vLLM's own prefix cache; the host pool keeps what it has."""
        self._ask({"forget": True})
        self._answer(ANSWER_S)

    def said(self) -> str:
        """All that it printed so far."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Let it shut down."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> Any:
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise TimeoutError(f"the engine has not answered for {timeout_s:g} s; its log ends: {self.said()[-3000:]}")
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine ended; its log ends: {self.said()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.close()
        self.kill()


def _live(setup: Mapping[str, Any], answers: int) -> None:
    from layerstream.hooks.vllm.local_engine import LocalEngine

    def say(value: Any) -> None:
        os.write(answers, json.dumps(value).encode() + b"\n")

    engine = LocalEngine(Path(setup["model"]), options=setup["options"], skip_tokenizer_init=True, **setup["arguments"])
    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if "forget" in request:
            engine.forget()
            say("forgotten")
            continue
        served = engine.serve_together(request["serve"], tokens=request["tokens"], logprobs=5)
        say(
            [
                {
                    "cached_tokens": one.cached_tokens,
                    "token_ids": list(one.token_ids),
                    "logprobs": [{str(token): value for token, value in step.items()} for step in one.logprobs],
                    "seconds": one.seconds,
                }
                for one in served
            ]
        )
    engine.close()


if __name__ == "__main__":
    _live(json.loads(sys.argv[1]), int(sys.argv[2]))
