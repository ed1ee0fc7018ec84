"""A real vLLM engine with the connector, as tests drive it: served requests, resets, and a look into the worker."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Logprobs = list[dict[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One served request."""

    tokens: tuple[int, ...]
    logprobs: Logprobs
    """Per generated token: the most likely tokens and their log probabilities."""
    cached: int
    """Prompt tokens that came from vLLM's own cache or from LayerStream."""


def prepare_environment() -> None:
    """What must be set before vllm is imported."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Lets a test run a function of its own in the worker, to look at bytes or to damage them.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


class VllmEngine:
    """`vllm.LLM` with the connector's options; started once and shared by many tests."""

    def __init__(self, model: Path, *, options: dict[str, Any] | None, kv_role: str = "kv_both", **engine: Any) -> None:
        """
        Args:
            model: a model folder.
            options: `kv_connector_extra_config`; None starts the engine without a connector.
            kv_role: as vLLM has it.
            engine: further arguments of `vllm.LLM`.
        """
        prepare_environment()
        import vllm

        transfer = None
        if options is not None:
            transfer = {
                "kv_connector": "LayerStreamConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": options,
            }
        self._vllm = vllm
        self.llm = vllm.LLM(
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            kv_transfer_config=transfer,
            **{"max_model_len": 8192, "enforce_eager": True, "disable_log_stats": True, **engine},
        )

    def serve(self, *prompts: Sequence[int], max_tokens: int = 4, **sampling: Any) -> list[Answer]:
        """Serve prompts of token ids together, greedily, and return their answers in order."""
        params = self._vllm.SamplingParams(
            max_tokens=max_tokens, temperature=0.0, logprobs=5, detokenize=False, ignore_eos=True, **sampling
        )
        outputs = self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [
            Answer(
                tokens=tuple(output.outputs[0].token_ids),
                logprobs=[
                    {token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs or []
                ],
                cached=output.num_cached_tokens or 0,
            )
            for output in outputs
        ]

    def reset(self, *, connector: bool = False) -> bool:
        """Clear vLLM's own prefix cache, and LayerStream's index too if asked."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(worker_half, *args)` in the first rank's process and return what it returns.

        The function must use nothing but its arguments: test modules cannot be imported in the engine's processes, so
        its code travels instead of its name.
        """
        return self.llm.collective_rpc(_in_worker, args=(marshal.dumps(function.__code__), *args))[0]

    def close(self) -> None:
        """Stop the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def _in_worker(_: Any, code: bytes, *args: Any) -> Any:
    import builtins
    import marshal
    import types

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    function = types.FunctionType(marshal.loads(code), {"__builtins__": builtins})
    return function(get_kv_transfer_group().worker, *args)


# Pickled with its code for the reason above, which picklers do for functions of the main module.
_in_worker.__module__ = "__main__"
