"""A real vLLM engine with the connector, and a look into its worker."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerstream.hooks.vllm.local_engine import LocalEngine


class VllmEngine(LocalEngine):
    """Started once and shared by many tests."""

    def __init__(self, model: Path, *, options: dict[str, Any], **arguments: Any) -> None:
        # Lets a test run a function of its own in the worker, to look at bytes or to damage them.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if "connectors" not in options:
            # How fast this machine is must not decide what is loaded.
            options = {"recompute": "never", **options}
        super().__init__(model, options=options, **{"max_model_len": 4096, "skip_tokenizer_init": True, **arguments})

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(worker_half, *args)` in the first rank's process and return what it returns.

        The function must use nothing but its arguments: test modules cannot be imported in the engine's processes, so
        its code travels instead of its name.
        """
        return self.in_workers(function, *args)[0]

    def in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same in the process of every rank."""
        return list(self.llm.collective_rpc(_in_worker, args=(marshal.dumps(function.__code__), *args)))


def _in_worker(_: Any, code: bytes, *args: Any) -> Any:
    import builtins
    import marshal
    import types

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    function = types.FunctionType(marshal.loads(code), {"__builtins__": builtins})
    return function(get_kv_transfer_group().worker, *args)


# Pickled with its code for the reason above, which picklers do for functions of the main module.
_in_worker.__module__ = "__main__"
