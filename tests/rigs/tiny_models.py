"""Tiny models with random weights, one for each way of keeping KV that vLLM's CPU build runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WINDOW = 200
"""Of layers that have one, in tokens: two blocks of the CPU engine and a little more."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}


def hybrid(folder: Path) -> Path:
    """Two layers in three have a window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SIZES, **HEADS, num_hidden_layers=6, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=64
    )
    return _save(Gemma3ForCausalLM, config, folder)


def windowed(folder: Path) -> Path:
    """Every layer has a window."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SIZES, **HEADS, num_hidden_layers=4, sliding_window=WINDOW)
    return _save(MistralForCausalLM, config, folder)


def latent(folder: Path) -> Path:
    """Keys and values as one latent vector (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **SIZES,
        num_key_value_heads=4,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    return _save(DeepseekV2ForCausalLM, config, folder)


def _save(model: Callable[[Any], Any], config: Any, folder: Path) -> Path:
    # transformers draws the weights from the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model(config).to(torch.float32).save_pretrained(folder)
    return folder
