"""A vLLM engine on this machine that serves one caller: for the demo, the benchmarks and the tests.

Whatever is compared is started here, so that engines differ in their connector alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.errors import LayerStreamError
from layerstream.hooks.vllm.register import NAME

SETTLE_S = 20.0
"""Longest wait for a report of the engine that is due within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What serving one prompt gave."""

    seconds: float
    """Wall time of the call that served it; with one token asked for, the time to first token."""
    cached_tokens: int
    """Prompt tokens that were not computed."""
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """Per generated token: token id -> logprob of the likeliest ones; empty if not asked for."""
    decode_seconds: float | None = None
    """From the first token to the last by the engine's clock; None for a single token."""


class LocalEngine:
    """`vllm.LLM` with one way to start it and one way to ask."""

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int,
        options: Mapping[str, Any] | None = None,
        connector: str | None = NAME,
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: a model's folder.
            max_model_len: prompt and answer of one request, in tokens.
            options: the connector's `kv_connector_extra_config`.
            connector: its name; None starts the engine without one.
            arguments: further arguments of `vllm.LLM`. Unless given, a prompt is prefilled in one step.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
        _set_environment()
        import torch
        from vllm import LLM, SamplingParams

        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(options or {}),
            }
        self.dtype = quick_dtype()
        self._params = SamplingParams
        self.llm = LLM(
            model=str(model),
            kv_transfer_config=transfer,
            max_model_len=max_model_len,
            **{
                "dtype": self.dtype,
                # Compiling for a CPU takes a C++ compiler and a minute, and the same hooks run either way.
                "enforce_eager": not torch.cuda.is_available(),
                "max_num_batched_tokens": max_model_len,
                "max_num_seqs": 8,
                "enable_prefix_caching": True,
                # Token times come with a request's statistics.
                "disable_log_stats": False,
                **arguments,
            },
        )

    @property
    def block_tokens(self) -> int:
        """Tokens in one KV block."""
        return int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self.llm.get_tokenizer().encode(text))

    def serve(self, prompt: Sequence[int], *, tokens: int = 1, logprobs: int | None = None) -> Answer:
        """Generate exactly `tokens` tokens greedily."""
        return self.serve_together([prompt], tokens=tokens, logprobs=logprobs)[0]

    def serve_together(
        self, prompts: Sequence[Sequence[int]], *, tokens: int = 1, logprobs: int | None = None
    ) -> list[Answer]:
        """Serve several prompts at once; answers in their order, each with the time of the whole call."""
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs, detokenize=False)
        begun = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return [
            Answer(
                seconds=seconds,
                cached_tokens=output.num_cached_tokens or 0,
                token_ids=tuple(output.outputs[0].token_ids),
                logprobs=tuple(
                    {token: found.logprob for token, found in step.items()} for step in output.outputs[0].logprobs or ()
                ),
                decode_seconds=output.metrics.last_token_ts - output.metrics.first_token_ts
                if tokens > 1 and output.metrics
                else None,
            )
            for output in outputs
        ]

    def forget(self, *, connector: bool = False) -> None:
        """Clear vLLM's own prefix cache, and the connector's cache too if `connector`.

        Raises:
            LayerStreamError: blocks are still in use long after the last request.
        """
        deadline = time.monotonic() + SETTLE_S
        while not self.llm.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > deadline:
                raise LayerStreamError(f"waited {SETTLE_S:g} s for vLLM to clear its prefix cache in vain")
            time.sleep(0.01)

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown(timeout=SETTLE_S)


def quick_dtype() -> str:
    """bfloat16, except on CPUs for which oneDNN has no bfloat16 matrix product: there float32 is several times faster.

    Those are x86 CPUs below AVX-512.
    """
    import torch

    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fast else "float32"


def _set_environment() -> None:
    """Settings of vLLM, where the user has not made them."""
    import torch

    if torch.cuda.is_available():
        # To ask is to initialize the driver, which a forked process cannot use any more.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return
    if not hasattr(os, "sched_getaffinity"):
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        # vLLM reserves one more core when a connector is configured, and on two cores that turns one compute core
        # into two, which then leave none to the copies. Bound to one, cold and warm compute on the same core and the
        # copies run on the others.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[0]))
