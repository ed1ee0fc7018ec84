"""A change of vLLM that matters is named; one that does not is not told."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

import pytest

from tests.hooks.vllm.contract.facts import Fact, Order
from tests.hooks.vllm.contract.relied_on import RELIED_ON
from tests.hooks.vllm.contract.reviewed import difference, facts_of
from tests.hooks.vllm.contract.signatures import without_docstring
from tests.hooks.vllm.contract.source import Source, installed

WATCHED = {name for fact in RELIED_ON if isinstance(fact, Order) for name in fact.watched.split()}

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
DRIVER, MIXIN = "v1/worker/gpu/kv_connector.py", "v1/worker/kv_connector_model_runner_mixin.py"
RUNNER, SCHEDULER = "v1/worker/gpu/model_runner.py", "v1/core/sched/scheduler.py"


class Changed(Source):
    """A vLLM of which some files hold something else, or are gone."""

    def __init__(self, real: Source, files: Mapping[str, str | None]) -> None:
        super().__init__(real.root)
        self._real, self._files = real, files

    def text(self, file: str) -> str | None:
        return self._files[file] if file in self._files else self._real.text(file)

    def _tree(self, file: str) -> ast.Module | None:
        return super()._tree(file) if file in self._files else self._real.tree(file)


@pytest.fixture(scope="module")
def real() -> Source:
    return installed()


def differences(real: Source, files: Mapping[str, str | None], facts: list[Fact]) -> str:
    return difference(facts_of(real, facts), facts_of(Changed(real, files), facts), names=("reviewed", "found"))


def swap(first: str, second: str) -> Callable[[str], str]:
    return lambda text: text.replace(first, "\0").replace(second, first).replace("\0", second)


def put(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


Edit = Callable[[str], str | None]

BREAKING: dict[str, tuple[str, str, Edit, str]] = {
    "a method has another name": (
        BASE,
        "methods of KVConnectorBase_V1",
        put("def wait_for_layer_load(", "def await_layer("),
        "+@abstractmethod await_layer(self, layer_name) -> None: pass",
    ),
    "a method has an argument more": (
        BASE,
        "methods of KVConnectorBase_V1",
        put("num_external_tokens: int\n    ):", "num_external_tokens: int, sync: bool\n    ):"),
        "+@abstractmethod update_state_after_alloc(self, request, blocks, num_external_tokens, sync): pass",
    ),
    "a method has to be overridden": (
        BASE,
        "methods of KVConnectorBase_V1",
        put("    def take_events(", "    @abstractmethod\n    def take_events("),
        "+@abstractmethod take_events(self)",
    ),
    "a method returns something else": (
        BASE,
        "methods of KVConnectorBase_V1",
        put("-> tuple[int | None, bool]:", "-> int:"),
        "+@abstractmethod get_num_new_matched_tokens(self, request, num_computed_tokens) -> int: pass",
    ),
    "a field of results is gone": (
        BASE,
        "KVConnectorTransferResults",
        put("    failed_recving: set", "    lost: set"),
        "-failed_recving: set[str] = field(default_factory=set)\n+lost: set[str]",
    ),
    "two calls change places": (
        MIXIN,
        "KVConnectorModelRunnerMixin._get_kv_connector_output",
        swap("kv_connector.wait_for_save()", "kv_connector.clear_connector_metadata()"),
        "-        .wait_for_save()\n+        .clear_connector_metadata()",
    ),
    "a condition is turned round": (
        MIXIN,
        "KVConnectorModelRunnerMixin._get_kv_connector_output",
        put("start_after_forward = not scheduler_output", "start_after_forward = scheduler_output"),
        "-start_after_forward = not .has_sync_kv_loads\n+start_after_forward = .has_sync_kv_loads",
    ),
    "preemptions are handled after the plan is bound": (
        DRIVER,
        "ActiveKVConnector.pre_forward",
        swap("handle_preemptions", "bind_connector_metadata"),
        "-.bind_connector_metadata(_)",
    ),
    "loads start without what the call carried": (
        DRIVER,
        "ActiveKVConnector._start_load_kv",
        put(", **load_kwargs)", ")"),
        "+    .start_load_kv(get_forward_context())",
    ),
    "a file is gone": (
        DRIVER,
        "ActiveKVConnector.post_forward",
        lambda _: None,
        "+(absent)",
    ),
    "a step without a graph does not begin": (
        RUNNER,
        "GPUModelRunner.execute_model",
        put("self.kv_connector.pre_forward(scheduler_output, input_batch)", "pass"),
        "-        .pre_forward()",
    ),
    "a FULL step does not show its metadata": (
        RUNNER,
        "GPUModelRunner.execute_model",
        put("scheduler_output, input_batch, attn_metadata=attn_metadata\n", "scheduler_output, input_batch\n"),
        "+    .pre_forward()",
    ),
    "the context does not show the mode": (
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.execute_model",
        put("cudagraph_runtime_mode=cudagraph_mode,", ""),
        "-with set_forward_context(attn_metadata, .vllm_config, cudagraph_runtime_mode=_)",
    ),
    "attention does not wait": (
        "model_executor/layers/attention/kv_transfer_utils.py",
        "maybe_transfer_kv_layer",
        put("connector.wait_for_layer_load(layer_name)", ""),
        "-    .wait_for_layer_load(_)",
    ),
    "ask again later means something else": (
        SCHEDULER,
        "Scheduler.schedule",
        put("if ext_tokens is None:", "if ext_tokens == 0:"),
        "+                if ext_tokens == 0:",
    ),
    "a step does not know that it loads": (
        SCHEDULER,
        "Scheduler.schedule",
        put("has_sync_kv_loads = True", "pass"),
        "-            has_sync_kv_loads = True",
    ),
    "blocks of a parked load are cached at once": (
        SCHEDULER,
        "Scheduler.schedule",
        put("delay_cache_blocks=load_kv_async", "delay_cache_blocks=False"),
        "delay_cache_blocks=False)",
    ),
    "reports do not arrive": (
        SCHEDULER,
        "Scheduler._update_from_kv_xfer_finished",
        put("self.connector.update_connector_output(kv_connector_output)", "pass"),
        "-    .update_connector_output(_)",
    ),
    "a field of a step is gone": (
        "v1/core/sched/output.py",
        "SchedulerOutput",
        put("has_sync_kv_loads: bool", "has_loads: bool"),
        "+has_sync_kv_loads (absent)",
    ),
    "hashes are kept in a new list each time": (
        "v1/request.py",
        "Request.update_block_hashes",
        put("self.block_hashes.extend(", "self.block_hashes = list("),
        "+    .block_hashes = ._block_hasher()",
    ),
    "a reference is not dropped but all are": (
        "v1/core/block_pool.py",
        "BlockPool.free_blocks",
        put("block.ref_cnt -= 1", "block.ref_cnt = 0"),
        "+    .ref_cnt = 0",
    ),
    "a function is gone": (
        "v1/core/kv_cache_utils.py",
        "get_none_hash_seed, resolve_none_hash_seed, DEFAULT_NONE_HASH_SEED, _NON_CRYPTO_HASH_FUNCTIONS",
        put("def get_none_hash_seed", "def none_seed"),
        "+get_none_hash_seed (absent)",
    ),
    "a mode has another name": (
        "config/compilation.py",
        "CUDAGraphMode",
        put("    FULL = 2\n", "    WHOLE = 2\n"),
        "+FULL (absent)",
    ),
    "a kind of cache passes for another": (
        "v1/kv_cache_interface.py",
        "classes that derive from KVCacheSpec",
        put(
            "class UniformTypeKVCacheSpecs(",
            "class PagedSpec(FullAttentionSpec): ...\n\nclass UniformTypeKVCacheSpecs(",
        ),
        "+class PagedSpec(FullAttentionSpec)",
    ),
    "what a window has passed is gone from the table": (
        "v1/core/single_type_kv_cache_manager.py",
        "SingleTypeKVCacheManager._remove_blocks_in_range",
        put("            blocks[i] = self._null_block", "            del blocks[i]"),
        "-    blocks[_] = ._null_block",
    ),
    "handshakes are under other keys": (
        "v1/worker/gpu_worker.py",
        "Worker.get_kv_connector_handshake_metadata",
        put("(pp_rank, tp_rank): metadata", "(tp_rank, pp_rank): metadata"),
        "+return ((tp_rank, pp_rank), metadata)",
    ),
    "something else calls the connector": (
        "v1/engine/core.py",
        "who calls a KV connector",
        put("class EngineCore:", "def later(connector): connector.reset_cache()\n\nclass EngineCore:"),
        "+reset_cache: v1/engine/core.py: later",
    ),
    "attention has no hooks": (
        "model_executor/layers/attention/attention.py",
        "functions under @maybe_transfer_kv_layer",
        put("@maybe_transfer_kv_layer", ""),
        "-model_executor/layers/attention/attention.py: unified_attention_with_output",
    ),
    "hashes are taken away elsewhere": (
        SCHEDULER,
        "what changes .block_hashes",
        put("class Scheduler(", "def shorten(request): request.block_hashes.pop()\n\nclass Scheduler("),
        "+v1/core/sched/scheduler.py: shorten: .block_hashes.pop()",
    ),
}


@pytest.mark.parametrize("case", BREAKING)
def test_a_change_that_matters_is_named(real: Source, case: str) -> None:
    file, name, edit, shown = BREAKING[case]
    text = real.text(file)
    assert text is not None
    edited = edit(text)
    assert edited != text, "this vLLM has another text there"
    (fact,) = [one for one in RELIED_ON if one.title in (f"{file}: {name}", name)]
    found = differences(real, {file: edited}, [fact])
    assert f"--- {fact.title} (reviewed)\n+++ {fact.title} (found)\n" in found
    assert shown in found
    assert f"relied on: {fact.why}\n" in found


class Disguise(ast.NodeTransformer):
    """Does not change what code does: other names of local variables, another layout, more statements, no comments."""

    def __init__(self, keep: set[str]) -> None:
        self._keep = keep

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        declared = {name for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and one.id in stored - arguments - declared - self._keep:
                one.id = f"other_{one.id}"
        if len(without_docstring(node)) > 1:
            node.body[-1:-1] = ast.parse(
                "seen = unrelated(now=True)\nlogger.debug('%s', seen)\nif seen is None:\n    return_late(seen)"
            ).body
        return node


def test_a_change_that_does_not_matter_is_not_told(real: Source) -> None:
    """All of it at once, in every file that is relied on."""
    before = facts_of(real)
    files = {file for fact in RELIED_ON if (file := getattr(fact, "file", None))}
    disguised: dict[str, str | None] = {}
    for file in sorted(files):
        text = real.text(file)
        assert text is not None
        tree = Disguise(WATCHED).visit(ast.parse(text))
        disguised[file] = ast.unparse(ast.fix_missing_locations(tree))
        assert disguised[file] != text
    assert difference(before, facts_of(Changed(real, disguised)), names=("before", "after")) == ""
