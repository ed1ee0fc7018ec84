"""vLLM's real scheduler and block pool over a model that only writes and checks bytes.

The KV of a token is a number made from the whole prefix up to it and the layer, so the right bytes of every block are
known. A step writes the KV of its tokens, runs the hooks in the order of vLLM's first model runner, and at every layer
checks all KV that attention would read: a block that was loaded late, into the wrong place, or from the wrong prefix is
seen in the step that would have used it.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from layerstream.hooks.vllm.connector import LayerStreamConnector
from layerstream.hooks.vllm.register import register
from tests.rigs.meeting import all_at_once

BLOCK = 16
LAYERS = 3
EOS = 1


class Chunked(int):
    """Attention sees so many tokens at most: those of its chunk."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids, others for each seed."""
    return [random.Random(seed * 7919 + i).randrange(2, 1000) for i in range(tokens)]


class WrongBytes(AssertionError):
    """Attention would have read KV of another prefix."""


class SchedulerRig:
    """An engine without a model. `step` is one engine step; `run` steps until nothing is left to do."""

    def __init__(
        self,
        folder: Path,
        *,
        options: dict[str, Any],
        num_blocks: int = 64,
        step_tokens: int = 128,
        ranks: int = 1,
        prefix_caching: bool = True,
        kv_role: str = "kv_both",
        windows: Sequence[int | None] = (None,),
        replicas: int = 1,
        block: int = BLOCK,
        heads: int = 1,
        events: bool = False,
    ) -> None:
        """
        Args:
            folder: for the model's config.
            options: of the connector.
            num_blocks: of vLLM's pool.
            step_tokens: most tokens a step computes.
            ranks: of the engine.
            prefix_caching: vLLM's own.
            kv_role: of the connector.
            replicas: so many consecutive ranks hold the same KV.
            block: tokens in a block.
            heads: KV heads of a rank.
            events: vLLM publishes cache events; `published` has them.
            windows: for each KV cache group the tokens that attention sees; None: all. Layers take turns.
        """
        # How fast this machine is must not decide what is loaded.
        options = {"sanitize": True, "recompute": "never", **options}
        self.block, self.heads, self.at_rank = block, heads, 0
        register()
        init_none_hash(sha256)
        self.config = vllm_config(folder, options, num_blocks, step_tokens, prefix_caching, kv_role, block)
        self.configure(self.config)
        self.config.parallel_config.world_size = ranks
        if events:
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.windows = tuple(windows)
        self.layers = [f"model.layers.{index}.attn" for index in range(LAYERS)]
        self.cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(self.layers[group :: len(windows)], self.spec(window))
                for group, window in enumerate(windows)
            ],
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block,
        )
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, LayerStreamConnector)
        self.published: list[Any] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        self.cache.kv_tp_replicas = replicas
        self.config.parallel_config.tensor_parallel_size = ranks
        self.workers = [
            LayerStreamConnector(_of_rank(self.config, rank), KVConnectorRole.WORKER, self.cache)
            for rank in range(ranks)
        ]
        self.kv = [{name: self._empty_cache() for name in self.layers} for _ in range(ranks)]
        register_caches = [
            partial(worker.register_kv_caches, tensors) for worker, tensors in zip(self.workers, self.kv, strict=True)
        ]
        if replicas == 1:
            for register_cache in register_caches:
                register_cache()
        else:
            all_at_once(register_caches)
        shakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.connector.set_xfer_handshake_metadata_pp_aware(shakes)
        self.aggregator = KVOutputAggregator(ranks)
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, int] = {}
        """Request -> tokens it had when it was first scheduled."""
        self.outputs: dict[str, list[int]] = {}
        self.held_back: set[int] = set()
        """Ranks whose reports do not arrive."""

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, tokens: Iterable[int], *, max_tokens: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        params.update_from_generation_config({}, EOS)
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(self.block, sha256),
        )
        self.requests[name] = request
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        for request in output.scheduled_new_reqs:
            self.hits.setdefault(request.req_id, request.num_computed_tokens)
        reports = [self._forward(rank, output) for rank in range(len(self.workers))]
        combined = self.aggregator.aggregate(reports)
        assert combined is not None
        for name, tokens in zip(combined.req_ids, combined.sampled_token_ids, strict=True):
            self.outputs[name] += tokens
        self.scheduler.update_from_output(output, combined)
        return output

    def run(self, limit: int = 10_000) -> int:
        """Step until every request has ended and no report is due; returns the number of steps."""
        for steps in range(limit):
            if not self.scheduler.has_requests():
                return steps
            if not self.step().num_scheduled_tokens:
                time.sleep(0.001)  # as the engine's loop does
        raise AssertionError(f"still busy after {limit} steps")

    def serve(self, name: str, tokens: Iterable[int], *, max_tokens: int = 1) -> int:
        """Serve one request to its end; returns the prompt tokens that were not computed."""
        self.add(name, tokens, max_tokens=max_tokens)
        self.run()
        return self.hits[name]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()
        self.scheduler.shutdown()

    def configure(self, config: VllmConfig) -> None:
        """For engines that know more of their model."""

    def spec(self, window: int | None) -> AttentionSpec:
        """Of layers whose attention sees so many tokens; None: all."""
        return _spec(window, self.block, self.heads)

    def _empty_cache(self) -> torch.Tensor:
        """A layer's cache on one rank, as vLLM shows it: `[blocks, heads, tokens, elements]`."""
        return torch.full((self.cache.num_blocks, self.heads, self.block, 4), -1, dtype=torch.int64)

    def _forward(self, rank: int, output: SchedulerOutput) -> ModelRunnerOutput:
        worker, kv = self.workers[rank], self.kv[rank]
        self.at_rank = rank
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        context: Any = SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=None)
        names = list(output.num_scheduled_tokens)
        if names:
            context.attn_metadata = {name: object() for name in self.layers}
        if output.has_sync_kv_loads:
            worker.start_load_kv(context)
        if names:
            for index, layer in enumerate(self.layers):
                for name in names:
                    self._write(kv[layer], index, name, output.num_scheduled_tokens[name])
                worker.wait_for_layer_load(layer)
                for name in names:
                    self._check(kv[layer], index, name, output.num_scheduled_tokens[name])
                worker.save_kv_layer(layer, kv[layer], None)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=None if rank in self.held_back else worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sample(name, output.num_scheduled_tokens[name]) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=report,
        )

    def _span(self, name: str, scheduled: int) -> tuple[Request, int, int]:
        # The scheduler has counted this step's tokens as computed already.
        request = self.requests[name]
        return request, request.num_computed_tokens - scheduled, request.num_computed_tokens

    def group_of(self, layer: int) -> int:
        """KV cache group of a layer."""
        return layer % len(self.windows)

    def first_seen(self, layer: int, position: int) -> int:
        """The first position that attention of a layer reads for the token at `position`."""
        window = self.windows[self.group_of(layer)]
        if isinstance(window, Chunked):
            return position - position % window
        return 0 if window is None else max(0, position - window + 1)

    def _places(self, name: str, stop: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.tensor(self.scheduler.kv_cache_manager.get_block_ids(name)[self.group_of(layer)])
        positions = torch.arange(stop)
        return blocks[positions // self.block], positions % self.block

    def _values(self, request: Request, stop: int, layer: int) -> torch.Tensor:
        value, values = 0, []
        for token in request.all_token_ids[:stop]:
            value = (value * 1_000_003 + token + 17) % (1 << 40)
            values.append(value * LAYERS + layer)
        return torch.tensor(values, dtype=torch.int64)

    def _rows(self, request: Request, stop: int, layer: int) -> torch.Tensor:
        """KV of the first `stop` tokens on the rank whose turn it is: `[tokens, heads, elements]`."""
        return self._values(request, stop, layer)[:, None, None].expand(-1, self.heads, 4)

    def _write(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        request, start, stop = self._span(name, scheduled)
        blocks, slots = self._places(name, stop, layer)
        cache[blocks[start:], :, slots[start:]] = self._rows(request, stop, layer)[start:]

    def _check(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        request, start, stop = self._span(name, scheduled)
        blocks, slots = self._places(name, stop, layer)
        read, want = cache[blocks, :, slots], self._rows(request, stop, layer)
        first = self.first_seen(layer, start)
        if not torch.equal(read[first:], want[first:]):
            wrong = (first + (read != want)[first:].flatten(1).any(dim=1).nonzero()[:, 0]).tolist()
            raise WrongBytes(f"request {name}, layer {layer}: wrong KV at tokens {wrong[:8]} of {stop}")

    def _sample(self, name: str, scheduled: int) -> list[int]:
        request, _, stop = self._span(name, scheduled)
        return [100 + (stop * 7919) % 900] if stop == request.num_tokens else []


def _of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration as the process of a rank has it."""
    its = copy.copy(config)
    its.parallel_config = copy.copy(config.parallel_config)
    its.parallel_config.rank = rank
    return its


def _spec(window: int | None, block: int, heads: int) -> AttentionSpec:
    shape: dict[str, Any] = {"block_size": block, "num_kv_heads": heads, "head_size": 4, "dtype": torch.float32}
    if isinstance(window, Chunked):
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=int(window))
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


def vllm_config(
    folder: Path,
    options: dict[str, Any],
    num_blocks: int,
    step_tokens: int,
    prefix_caching: bool,
    kv_role: str = "kv_both",
    block: int = BLOCK,
) -> VllmConfig:
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "num_hidden_layers": LAYERS,
                "vocab_size": 1024,
                "max_position_embeddings": 4096,
            }
        )
    )
    cache = CacheConfig(block_size=block, enable_prefix_caching=prefix_caching)
    cache.kv_cache_layout = "LBHNC"
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LayerStreamConnector", kv_role=kv_role, kv_connector_extra_config=options
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return config
