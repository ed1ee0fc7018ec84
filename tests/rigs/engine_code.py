"""What runs in the processes of an engine under test: `ServingEngine` sends it there.

Functions travel by their code and can use nothing but their arguments and what they import: test modules cannot be
imported in the engine's processes.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    def run_for_tests(self: Any, code: bytes, args: list[Any]) -> Any:
        import builtins
        import marshal
        import types

        return types.FunctionType(marshal.loads(code), {"__builtins__": builtins})(self, *args)

    EngineCore.run_for_tests = run_for_tests


def in_worker(worker: Any, code: bytes, what: str, *args: Any) -> Any:
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
install.__module__ = in_worker.__module__ = "__main__"


def count(core: Any) -> None:
    scheduler = core.scheduler
    core.loads, core.preempted = [], 0
    connector, preempt = scheduler.connector, scheduler._preempt_request
    match, allocated, local = connector.get_num_new_matched_tokens, connector.update_state_after_alloc, {}

    def note_local(request: Any, tokens: int) -> Any:
        local[request.request_id] = tokens
        return match(request, tokens)

    def count_load(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            until = local[request.request_id] + tokens
            core.loads.append((tokens, until, request.num_tokens, request.num_prompt_tokens))
        allocated(request, blocks, tokens)

    def count_preemption(*args: Any, **kwargs: Any) -> Any:
        core.preempted += 1
        return preempt(*args, **kwargs)

    connector.get_num_new_matched_tokens = note_local
    connector.update_state_after_alloc = count_load
    scheduler._preempt_request = count_preemption


def take_loads(core: Any) -> list[tuple[int, int, int, int]]:
    taken, core.loads = core.loads, []
    return list(taken)


def take_preemptions(core: Any) -> int:
    taken, core.preempted = core.preempted, 0
    return int(taken)


def books(core: Any) -> dict[str, int]:
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


def pid(_: Any) -> int:
    import os

    return os.getpid()


def stand_in_for_cuda_streams(_: Any) -> None:
    """The model runner copies a step's tokens on a CUDA stream; on a CPU they are there when the step is over."""
    import contextlib
    import importlib

    cuda: Any = importlib.import_module("torch.cuda")

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: None

    cuda.Event = Nothing
    cuda.current_stream = lambda *_: Nothing()
    cuda.stream = lambda _: contextlib.nullcontext()
