"""How many bytes of KV cache a model keeps, from its Hugging Face `config.json` alone.

With L layers, h KV heads of d elements and b bytes an element, one token is

    multi-head, grouped-query, multi-query:  L * h * 2 * d * b             keys and values of every KV head
    multi-head latent attention (MLA):       L * (kv_lora_rank + qk_rope_head_dim) * b    one latent for all heads

(grouped-query: Ainslie et al. 2023, arXiv 2305.13245; MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1). Tensor
parallelism divides the KV heads, or replicates them once there are fewer heads than ranks; the latent of MLA is
replicated. Pipeline parallelism divides the layers. A layer with a sliding window of w tokens keeps the last w only.
Weights, activations and padding that an attention backend adds are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.errors import ConfigError

KV_DTYPES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of one element, under vLLM's names for `--kv-cache-dtype` (and float32, for a model served in it)."""

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}

# Keys that mean some layers keep something other than keys and values per token, or share them with another layer.
_NOT_PLAIN_ATTENTION = (
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "num_kv_shared_layers",
    "ssm_cfg",
)

# Families whose config may name a window without saying which layers have it: every n-th layer is full (transformers'
# configuration classes give the same defaults), or n = 0 and every layer has the window.
_FULL_EVERY = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "mistral": 0,
    "mixtral": 0,
    "phi3": 0,
    "starcoder2": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """KV bytes of one model under one way of spreading it over ranks.

    A pool belongs to one rank, and a chunk is kept only if every rank has room, so sizes are those of the rank with
    the most bytes unless they say otherwise.
    """

    attention: str
    """"MHA", "GQA", "MQA" or "MLA"."""
    kv_dtype: str
    stages: tuple[tuple[int | None, ...], ...]
    """Per pipeline stage, the window in tokens of each of its layers; None is full attention."""
    rank_heads: int
    """KV heads on one rank; 1 for MLA."""
    head_elements: int
    """Elements that one KV head of one layer keeps for one token, keys and values together."""
    tp: int
    block_tokens: int

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return sum(len(stage) for stage in self.stages)

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        return self.block_tokens * self.rank_heads * self.head_elements * KV_DTYPES[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the fullest rank."""
        return self.page_bytes * max(len(stage) for stage in self.stages)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token writes on the fullest rank."""
        return self.block_bytes // self.block_tokens

    @property
    def total_token_bytes(self) -> int:
        """Bytes that one token writes over all ranks, replicas counted."""
        return self.page_bytes * self.layers * self.tp // self.block_tokens

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` keeps in the KV cache of the fullest rank, in whole blocks."""
        return max(self._stage_bytes(stage, tokens) for stage in self.stages)

    def total_sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` keeps over all ranks, in whole blocks, replicas counted."""
        return self.tp * sum(self._stage_bytes(stage, tokens) for stage in self.stages)

    def tokens_in(self, pool_bytes: int) -> int:
        """Tokens, in whole blocks over all layers, that a pool of `pool_bytes` on every rank holds."""
        return pool_bytes // self.block_bytes * self.block_tokens

    def stored_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` takes in the host pool of the fullest rank, in whole blocks.

        All layers of every block, also where a window has passed them: a hit may end at any block.
        """
        return -(-tokens // self.block_tokens) * self.block_bytes

    def sequences_in(self, pool_bytes: int, tokens: int) -> int:
        """Sequences of `tokens` without a common prefix that a pool of `pool_bytes` on every rank holds."""
        return pool_bytes // self.stored_bytes(tokens)

    def _stage_bytes(self, stage: tuple[int | None, ...], tokens: int) -> int:
        return self.page_bytes * sum(self._blocks(window, tokens) for window in stage)

    def _blocks(self, window: int | None, tokens: int) -> int:
        blocks = -(-tokens // self.block_tokens)
        if window is None:
            return blocks
        # The next token sees itself and the window - 1 before it, which may begin anywhere inside a block
        # (vLLM: SlidingWindowSpec.max_admission_blocks_per_request).
        return min(blocks, -(-(window - 1) // self.block_tokens) + 1)


def kv_capacity(
    config: Mapping[str, Any], *, kv_dtype: str = "auto", tp: int = 1, pp: int = 1, block_tokens: int = 16
) -> Capacity:
    """Derive the capacity of a model.

    Args:
        config: the content of a Hugging Face `config.json`; the language part of a multimodal model is found inside.
        kv_dtype: a name of `KV_DTYPES`, bf16, fp16 or fp32, or "auto": the type the model is served in. vLLM serves
            float32 checkpoints in 16 bits, and so does "auto".
        tp: tensor parallel ranks.
        pp: pipeline stages.
        block_tokens: tokens in one block.

    Raises:
        ConfigError: the config lacks a key, describes layers other than plain attention, or cannot be spread over
            that many ranks.
    """
    for name, value in (("tp", tp), ("pp", pp), ("block size", block_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError(f"`text_config` is of type {type(text).__name__}; a JSON object is needed")
    _refuse_other_layers(text)
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(text, "num_attention_heads", "n_head")
    if heads % tp:
        raise ConfigError(f"{heads} attention heads cannot be divided over tp={tp} ranks; use a divisor of {heads}")
    if pp > layers:
        raise ConfigError(f"pp={pp} stages for {layers} layers; each stage needs at least one layer")
    if text.get("kv_lora_rank") is not None:
        attention, rank_heads = "MLA", 1
        head_elements = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        windows: tuple[int | None, ...] = (None,) * layers
    else:
        kv_heads = _kv_heads(text, heads)
        attention = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        if kv_heads % tp and tp % kv_heads:
            raise ConfigError(f"{kv_heads} KV heads can neither be divided nor replicated evenly over tp={tp} ranks")
        rank_heads = max(1, kv_heads // tp)
        head_elements = 2 * _head_dim(text, heads)
        windows = _windows(text, layers)
    return Capacity(
        attention=attention,
        kv_dtype=_kv_dtype(config, text, kv_dtype),
        stages=_stages(windows, pp),
        rank_heads=rank_heads,
        head_elements=head_elements,
        tp=tp,
        block_tokens=block_tokens,
    )


def load_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, named itself or through the model folder that holds it.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); give a local model folder or Hugging Face config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); give a model folder or a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a JSON {type(config).__name__}; a Hugging Face config is an object")
    return config


def _refuse_other_layers(text: Mapping[str, Any]) -> None:
    found = [key for key in _NOT_PLAIN_ATTENTION if text.get(key)]
    if text.get("is_encoder_decoder"):
        found.append("is_encoder_decoder")
    if found:
        raise ConfigError(
            f"the config has {', '.join(found)}: layers whose cache is not keys and values of plain attention; "
            "understood are decoders with MHA, GQA, MQA or MLA, with or without sliding windows"
        )


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that is there; the others are what older families call the same thing."""
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"`{name}` is {value!r} in the config; a whole number of at least 1 is needed")
        return value
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    raise ConfigError(f"the config has no `{names[0]}`{others}; is it the config.json of a language model?")


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    # Falcon: `multi_query` means one KV head, except in its newer architecture, which names their number.
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
    return _number(text, *names) if any(text.get(name) is not None for name in names) else heads


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    names = ("head_dim", "kv_channels")
    if any(text.get(name) is not None for name in names):
        dim = _number(text, *names)
    else:
        hidden = _number(text, "hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise ConfigError(f"`head_dim` is missing, and hidden size {hidden} is not a multiple of {heads} heads")
        dim = hidden // heads
    if text.get("v_head_dim") not in (None, dim):
        raise ConfigError(
            f"keys have {dim} elements a head and values {text['v_head_dim']!r} (`v_head_dim`); "
            "how they are padded is the backend's affair, so only equal sizes are understood"
        )
    return dim


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None where it is full attention."""
    kinds = text.get("layer_types")
    if kinds is not None:
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise ConfigError(
                f"`layer_types` lists {len(kinds)} layers{' with ' if unknown else ''}{', '.join(unknown)}; "
                f"needed are {layers}, each full_attention or sliding_attention"
            )
        return tuple(_number(text, "sliding_window") if kind == "sliding_attention" else None for kind in kinds)
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return (None,) * layers
    window = _number(text, "sliding_window")
    if text.get("use_sliding_window"):
        # Qwen2's convention: the first `max_window_layers` layers are full.
        full = text.get("max_window_layers", layers)
        return tuple(None if layer < full else window for layer in range(layers))
    model_type = text.get("model_type")
    every = text.get("sliding_window_pattern", _FULL_EVERY.get(str(model_type)))
    if not isinstance(every, int):
        raise ConfigError(
            f"`sliding_window` is {window}, and nothing says which layers of model type {model_type!r} have it; "
            "add `layer_types` to the config, or set `sliding_window` to null if it is not used"
        )
    return tuple(None if every and (layer + 1) % every == 0 else window for layer in range(layers))


def _kv_dtype(config: Mapping[str, Any], text: Mapping[str, Any], asked: str) -> str:
    if asked != "auto":
        name = _SHORT_DTYPES.get(asked, asked)
        if name not in KV_DTYPES:
            allowed = ", ".join(["auto", *KV_DTYPES, *_SHORT_DTYPES])
            raise ConfigError(f"KV dtype {asked!r} is not known; allowed are {allowed}")
        return name
    quantization = config.get("quantization_config") or {}
    if quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"):
        raise ConfigError(
            "the checkpoint asks for a quantized KV cache; say which type it is served in: --kv-dtype fp8"
        )
    for holder in (text, config):
        served = holder.get("dtype") or holder.get("torch_dtype")
        if served in ("bfloat16", "float16"):
            return str(served)
        if served not in (None, "float32"):
            raise ConfigError(f"the config's dtype is {served!r}; say the type of the KV cache: --kv-dtype bfloat16")
    return "bfloat16"


def _stages(windows: tuple[int | None, ...], pp: int) -> tuple[tuple[int | None, ...], ...]:
    """Layers per pipeline stage as vLLM spreads them: what remains goes to the stages just before the last."""
    sizes = [len(windows) // pp] * pp
    for stage in range(2, len(windows) % pp + 2):
        sizes[-stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(windows[start : start + size] for start, size in zip(starts, sizes, strict=True))
