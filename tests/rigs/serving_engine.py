"""A real vLLM engine whose scheduler and worker a test can look into."""

from __future__ import annotations

import marshal
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.rigs import engine_code
from tests.rigs.vllm_engine import VllmEngine

BLOCK = 32
SETTLE_S = 30.0
TOLERANCE = 1e-4
"""Logprobs of one prompt computed in steps of different shapes differ by about 1e-6; wrong KV by 0.01 and more."""

Prompt = Sequence[int] | Mapping[str, Any]


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=tokens)


def whole_blocks(tokens: int) -> int:
    """Tokens of a prompt that can be hit: whole blocks, never the block of the last token."""
    return (tokens - 1) // BLOCK * BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One completion."""

    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    finish_reason: str | None


class Load(NamedTuple):
    """Tokens that vLLM took from the connector when it admitted a request."""

    tokens: int
    until: int
    """Where in the request they end."""
    known: int
    """Tokens that the request then had."""
    asked: int
    """Those of its prompt."""


def difference(one: Served, other: Served) -> float:
    """Largest difference of logprobs over all tokens that both name at the same place; infinite if tokens differ."""
    if one.token_ids != other.token_ids or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    return max(
        abs(mine[token] - theirs[token])
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
        for token in mine.keys() & theirs.keys()
    )


def served(output: Any) -> list[Served]:
    """Every completion of one of vLLM's outputs."""
    return [
        Served(
            cached_tokens=output.num_cached_tokens or 0,
            token_ids=tuple(one.token_ids),
            logprobs=tuple({token: found.logprob for token, found in step.items()} for step in one.logprobs or ()),
            finish_reason=one.finish_reason,
        )
        for one in output.outputs
    ]


class ServingEngine(VllmEngine):
    """`VllmEngine` in float32 with small blocks."""

    def __init__(
        self,
        model: Path,
        *,
        options: Mapping[str, Any] | None = None,
        two_steps_in_flight: bool = False,
        transfer: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: a model's folder.
            options: of the connector.
            two_steps_in_flight: schedule the next step while one runs, which vLLM's CPU platform turns off.
            transfer: further entries of vLLM's `kv_transfer_config`.
            arguments: of `VllmEngine`.
        """
        self.closed = False
        with ExitStack() as stack:
            if two_steps_in_flight:
                stack.enter_context(_async_scheduling_stays_on())
            if transfer is not None:
                stack.enter_context(_transfer_config(transfer))
            super().__init__(
                model,
                options={"log_interval_s": 0, **(options or {})},
                **{"dtype": "float32", "block_size": BLOCK, "max_model_len": 1024, **arguments},
            )
        try:
            if two_steps_in_flight:
                assert self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
                self.in_worker(engine_code.stand_in_for_cuda_streams)
            core = self.llm.llm_engine.engine_core
            core.call_utility("__setattr__", "install_for_tests", engine_code.install)
            core.call_utility("install_for_tests")
            self.in_core(engine_code.count)
            self.idle = self.books()
        except BaseException:
            self.close()
            raise

    def in_core(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(engine_core, *args)` in the scheduler's process and return what it returns."""
        core = self.llm.llm_engine.engine_core
        return core.call_utility("run_for_tests", marshal.dumps(function.__code__), list(args))

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(worker_half, *args)` in the first rank's process and return what it returns."""
        return self.llm.collective_rpc(engine_code.in_worker, args=(marshal.dumps(function.__code__), "half", *args))[0]

    def in_model(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(model, *args)` in the first rank's process and return what it returns."""
        return self.llm.collective_rpc(engine_code.in_worker, args=(marshal.dumps(function.__code__), "model", *args))[
            0
        ]

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        tokens: int | Sequence[int] = 4,
        cold: bool = False,
        lora: Any = None,
        priority: Sequence[int] | None = None,
        **params: Any,
    ) -> list[Served]:
        """Serve prompts together, greedily unless `params` say otherwise; every completion in the prompts' order.

        Args:
            prompts: token ids, or what vLLM takes for a prompt.
            tokens: exactly so many are generated, for all prompts or for each.
            cold: compute all of it, whatever any cache holds.
            lora: vLLM's request for an adapter.
            priority: for each prompt.
            params: of vLLM's `SamplingParams`.
        """
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        sampling = [self.sampling(tokens=count, skip_reading_prefix_cache=cold or None, **params) for count in counts]
        asked = [dict(one) if isinstance(one, Mapping) else {"prompt_token_ids": list(one)} for one in prompts]
        outputs = self.llm.generate(
            asked,
            sampling,
            use_tqdm=False,
            lora_request=lora,
            priority=None if priority is None else list(priority),
        )
        return [each for output in outputs for each in served(output)]

    def sampling(self, *, tokens: int, **params: Any) -> Any:
        defaults = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5, "detokenize": False}
        return self._params(max_tokens=tokens, **{**defaults, **params})

    def books(self) -> dict[str, int]:
        """What is in use in vLLM's pool and in the scheduler half."""
        return dict(self.in_core(engine_code.books))

    def settled(self) -> dict[str, int]:
        """`books` once no transfer is under way, which must be soon after the last request."""
        deadline = time.monotonic() + SETTLE_S
        while (books := self.books())["due"] or books["requests"]:
            assert time.monotonic() < deadline, f"still under way: {books}"
            time.sleep(0.02)
        return books

    def loads(self) -> list[Load]:
        """Each load since the last call, in the order in which vLLM admitted them."""
        return [Load(*each) for each in self.in_core(engine_code.take_loads)]

    def loaded(self) -> list[int]:
        """The tokens of each load since the last call."""
        return [load.tokens for load in self.loads()]

    def preemptions(self) -> int:
        """Since the last call."""
        return int(self.in_core(engine_code.take_preemptions))

    def processes(self) -> list[int]:
        """The scheduler's and the worker's."""
        return [self.in_core(engine_code.pid), self.in_worker(engine_code.pid)]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            super().close()


@contextmanager
def _async_scheduling_stays_on() -> Any:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(_: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep)):
        yield


@contextmanager
def _transfer_config(more: Mapping[str, Any]) -> Any:
    """Adds to the `kv_transfer_config` with which `LocalEngine` makes its `vllm.LLM`."""
    import vllm

    real = vllm.LLM

    def make(*, kv_transfer_config: dict[str, Any], **arguments: Any) -> Any:
        return real(kv_transfer_config={**kv_transfer_config, **more}, **arguments)

    with mock.patch.object(vllm, "LLM", make):
        yield
