"""The namespace of a vLLM engine: everything beside the block hash that changes the bytes of its KV."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from layerstream.hooks.vllm.compat import cache_groups
from layerstream.identity import Namespace, canonical_digest, fingerprint_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from layerstream.geometry import KVGeometry
    from layerstream.jobs import RankInfo

_RANDOM_SEED_HASHES = ("xxhash", "xxhash_cbor")
"""Hash algorithms whose first hash is random in each process unless PYTHONHASHSEED is set."""


def geometry_digest(geometry: KVGeometry) -> str:
    """Names one rank's layers and how their pages are packed, wherever the pages lie."""
    return canonical_digest(
        [[layer.name, layer.page_bytes, len(layer.run_offsets), layer.run_bytes] for layer in geometry.layers]
    )


def attention_of(vllm_config: VllmConfig, layers: Iterable[str]) -> tuple[str, str | None]:
    """Which attention backends write these layers, and which instruction set they pack pages for (None on a GPU).

    Only a worker knows; layers learn the instruction set when the KV cache is made.
    """
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layers)).values()
    backends = sorted({layer.get_attn_backend().get_name() for layer in found})
    isas = sorted({str(layer.isa) for layer in found if getattr(layer, "isa", None) is not None})
    return ",".join(backends), ",".join(isas) or None


def namespace_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    ranks: Sequence[RankInfo],
    *,
    user: str,
    epoch: int,
) -> Namespace:
    """Describe the engine.

    Args:
        vllm_config: as the scheduler has it.
        kv_cache_config: as the scheduler has it.
        ranks: what every rank reported, in any order.
        user: option `namespace`.
        epoch: weight updates in this process.

    Raises:
        ConfigError: a safetensors file of the model is damaged.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    groups = cache_groups(kv_cache_config)
    folder = _weights_folder(vllm_config, model)
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    algorithm = cache.prefix_caching_hash_algo
    seed = get_none_hash_seed()
    quantized = cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32")
    weights = None if folder is None else fingerprint_weights(folder)
    return Namespace(
        # Equal weights are the same model, wherever they lie and however they are called.
        model="" if weights else str(model.model),
        revision=None if weights else model.revision,
        weights=weights,
        drafter=_drafter(vllm_config),
        load_format=str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format)),
        quantization=model.quantization,
        model_config=canonical_digest(_without_origin(json.loads(model.hf_config.to_json_string(use_diff=False)))),
        processor=_processor(folder, getattr(model.multimodal_config, "mm_processor_kwargs", None)),
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache.cache_dtype),
        kv_scales="checkpoint" if quantized else None,
        layout=str(kv_cache_config.kv_cache_layout),
        attention_backend=",".join(sorted({rank.attention_backend for rank in ordered})),
        isa=",".join(sorted({rank.isa for rank in ordered if rank.isa})) or None,
        block_tokens=groups.block_tokens,
        hash_block_tokens=kv_cache_config.hash_block_size or groups.block_tokens,
        hash_algorithm=algorithm,
        hash_seed=None if algorithm in _RANDOM_SEED_HASHES and "PYTHONHASHSEED" not in os.environ else seed,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        # Objects are numbered among the ranks that keep some, so who does is a part of their name.
        ranks=canonical_digest([rank.geometry if rank.keeps else None for rank in ordered]),
        lora="by name and path" if vllm_config.lora_config is not None else "none",
        user=user,
        epoch=epoch,
    )


def _without_origin(config: Any) -> Any:
    """A model's configuration without what says where it came from, which changes no byte."""
    if isinstance(config, dict):
        return {
            key: _without_origin(value)
            for key, value in config.items()
            if key not in {"_name_or_path", "transformers_version"}
        }
    return config


def _processor(folder: Path | None, arguments: Mapping[str, Any] | None) -> str:
    """Digest of how images and sounds become what the model sees."""
    files = [] if folder is None else sorted(folder.glob("*processor_config.json"))
    return canonical_digest([[file.name, file.read_text(errors="replace")] for file in files] + [repr(arguments)])


def _drafter(vllm_config: VllmConfig) -> str | None:
    """Fingerprint of the model that drafts; empty without one, and where it lies among the model's own files."""
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    model = vllm_config.model_config
    if drafter is None or (drafter.model, drafter.revision) == (model.model, model.revision):
        return ""
    folder = _weights_folder(vllm_config, drafter)
    return None if folder is None else fingerprint_weights(folder)


def model_folders(vllm_config: VllmConfig) -> list[Path]:
    """Folders on this machine whose files name the weights: the model's, and that of a model that drafts."""
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = [model for model in (vllm_config.model_config, drafter) if model is not None]
    return [folder for model in models if (folder := _weights_folder(vllm_config, model)) is not None]


def _weights_folder(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    """Where this machine keeps a model's files, also if it was given by its name in the Hugging Face hub.

    Weights are loaded by the time ranks report, so what was to be downloaded is.
    """
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        found = snapshot_download(
            str(model.model),
            revision=model.revision,
            cache_dir=vllm_config.load_config.download_dir,
            allow_patterns=["*.safetensors", "*.safetensors.index.json", "*processor_config.json"],
            local_files_only=True,
        )
    except (OSError, ValueError):
        # Not in the hub's cache, or no name that a hub could have: a bucket, a model of another loader.
        return None
    return Path(found)
