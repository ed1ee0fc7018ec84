"""A real vLLM engine whose scheduler and worker a test can look into, slow down and damage.

Functions travel to the engine's processes by their code and can use nothing but their arguments and what they import:
test modules cannot be imported there.
"""

from __future__ import annotations

import marshal
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from layerstream.hooks.vllm.register import NAME
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
                self.in_worker(_stand_in_for_cuda_streams)
            core = self.llm.llm_engine.engine_core
            core.call_utility("__setattr__", "install_for_tests", _install)
            core.call_utility("install_for_tests")
            self.in_core(_count)
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
        return self.llm.collective_rpc(_in_worker, args=(marshal.dumps(function.__code__), "half", *args))[0]

    def in_model(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(model, *args)` in the first rank's process and return what it returns."""
        return self.llm.collective_rpc(_in_worker, args=(marshal.dumps(function.__code__), "model", *args))[0]

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        tokens: int = 4,
        cold: bool = False,
        lora: Any = None,
        priority: Sequence[int] | None = None,
        **params: Any,
    ) -> list[Served]:
        """Serve prompts together, greedily unless `params` say otherwise; every completion in the prompts' order.

        Args:
            prompts: token ids, or what vLLM takes for a prompt.
            tokens: exactly so many are generated.
            cold: compute all of it, whatever any cache holds.
            lora: vLLM's request for an adapter.
            priority: for each prompt.
            params: of vLLM's `SamplingParams`.
        """
        sampling = self.sampling(tokens=tokens, skip_reading_prefix_cache=cold or None, **params)
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
        return dict(self.in_core(_books))

    def settled(self) -> dict[str, int]:
        """`books` once no transfer is under way, which must be soon after the last request."""
        deadline = time.monotonic() + SETTLE_S
        while (books := self.books())["due"] or books["requests"]:
            assert time.monotonic() < deadline, f"still under way: {books}"
            time.sleep(0.02)
        return books

    def external(self) -> list[tuple[int, int, int]]:
        """Each load since the last call, as vLLM admitted it: its tokens, all tokens then known of the request, and
        those of its prompt."""
        return [(loaded, known, asked) for loaded, known, asked in self.in_core(_take_external)]

    def preemptions(self) -> int:
        """Since the last call."""
        return int(self.in_core(_take_preemptions))

    def processes(self) -> list[int]:
        return [self.in_core(_pid), self.in_worker(_pid)]


@contextmanager
def _async_scheduling_stays_on() -> Any:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", keep):
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


def _install() -> None:
    from vllm.v1.engine.core import EngineCore

    def run_for_tests(self: Any, code: bytes, args: list[Any]) -> Any:
        import builtins
        import marshal
        import types

        return types.FunctionType(marshal.loads(code), {"__builtins__": builtins})(self, *args)

    EngineCore.run_for_tests = run_for_tests


def _in_worker(worker: Any, code: bytes, what: str, *args: Any) -> Any:
    import builtins
    import marshal
    import types

    function = types.FunctionType(marshal.loads(code), {"__builtins__": builtins})
    if what == "model":
        return function(worker.model_runner.get_model(), *args)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    children = getattr(connector, "_connectors", [connector])
    return function(next(each for each in children if hasattr(each, "worker")).worker, *args)


# Pickled with their code for the reason above, which picklers do for functions of the main module.
_install.__module__ = _in_worker.__module__ = "__main__"


def _count(core: Any) -> None:
    scheduler = core.scheduler
    core.external, core.preempted = [], 0
    allocated, preempt = scheduler.connector.update_state_after_alloc, scheduler._preempt_request

    def count_external(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            core.external.append((tokens, request.num_tokens, request.num_prompt_tokens))
        allocated(request, blocks, tokens)

    def count_preemption(*args: Any, **kwargs: Any) -> Any:
        core.preempted += 1
        return preempt(*args, **kwargs)

    scheduler.connector.update_state_after_alloc = count_external
    scheduler._preempt_request = count_preemption


def _take_external(core: Any) -> list[tuple[int, int, int]]:
    taken, core.external = core.external, []
    return list(taken)


def _take_preemptions(core: Any) -> int:
    taken, core.preempted = core.preempted, 0
    return int(taken)


def _books(core: Any) -> dict[str, int]:
    scheduler = core.scheduler
    children = getattr(scheduler.connector, "_connectors", [scheduler.connector])
    half = next(each for each in children if hasattr(each, "scheduler")).scheduler
    coordinator, pool = half._coordinator, scheduler.kv_cache_manager.block_pool
    chunks = coordinator._index._heads.values()
    return {
        "free": pool.get_num_free_blocks(),
        "references": sum(block.ref_cnt for block in pool.blocks if not block.is_null),
        "pins": sum(chunk.pins for chunk in chunks),
        "writers": sum(chunk.writers for chunk in chunks),
        "due": len(coordinator._flights._due),
        "overdue": len(coordinator._flights._overdue),
        "requests": len(scheduler.requests) + len(half._requests) + len(half._asked) + len(coordinator._requests),
    }


def _pid(_: Any) -> int:
    import os

    return os.getpid()


def _stand_in_for_cuda_streams(_: Any) -> None:
    """The model runner copies a step's tokens on a CUDA stream; on a CPU they are there when the step is over."""
    import contextlib

    import torch

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: None

    torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *_: Nothing()
    torch.cuda.stream = lambda _: contextlib.nullcontext()


class Gate:
    """Holds the copies of some of a worker's streams until it is opened. A context manager."""

    def __init__(self, engine: ServingEngine, file: Path, *streams: str) -> None:
        self._engine, self._file, self._streams = engine, file, list(streams)
        self._reached = file.with_suffix(".reached")

    def __enter__(self) -> Gate:
        self._file.touch()
        self._engine.in_worker(_late_copies, self._streams, str(self._file), str(self._reached), 0.0, 0)
        return self

    def await_copy(self) -> None:
        """Wait until a copy is held."""
        deadline = time.monotonic() + SETTLE_S
        while not self._reached.exists():
            assert time.monotonic() < deadline, f"no copy of {self._streams} was made"
            time.sleep(0.005)

    def open(self) -> None:
        self._file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.open()
        if self._engine.llm.llm_engine.engine_core.resources.engine_dead:
            return
        self._engine.in_worker(_prompt_copies)


def delay_copies(engine: ServingEngine, *, most_s: float, seed: int) -> None:
    """From here on each copy is late by a random time."""
    engine.in_worker(_late_copies, [], "", "", most_s, seed)


def _late_copies(_: Any, streams: list[str], gate: str, reached: str, most_s: float, seed: int) -> None:
    import os
    import random
    import time

    from layerstream.streams import cpu_streams

    attempt = getattr(cpu_streams, "prompt_attempt", cpu_streams._attempt)
    cpu_streams.prompt_attempt = attempt
    dice = random.Random(seed)

    def late(stream: str, work: Any, args: Any, kwargs: Any) -> Any:
        if work is not cpu_streams._pass and (not streams or stream in streams):
            if gate:
                open(reached, "w").close()
                while os.path.exists(gate):
                    time.sleep(0.002)
            time.sleep(dice.uniform(0, most_s))
        return attempt(stream, work, args, kwargs)

    cpu_streams._attempt = late


def _prompt_copies(_: Any) -> None:
    from layerstream.streams import cpu_streams

    cpu_streams._attempt = cpu_streams.prompt_attempt


def resident_mib(processes: Sequence[int]) -> float:
    """Memory of its own that these processes have in RAM."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


__all__ = [
    "BLOCK",
    "NAME",
    "TOLERANCE",
    "Gate",
    "Served",
    "ServingEngine",
    "delay_copies",
    "difference",
    "prompt",
    "resident_mib",
    "served",
    "whole_blocks",
]
