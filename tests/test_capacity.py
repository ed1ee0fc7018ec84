from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.capacity import kv_capacity, load_config
from layerstream.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

KIB, GIB = 1 << 10, 1 << 30

# Sizes from the models' own config.json files.
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_llama_8b_keeps_128_kib_a_token_and_1_gib_at_8192_tokens() -> None:
    capacity = kv_capacity(LLAMA_8B)
    assert capacity.attention == "GQA" and capacity.kv_dtype == "bfloat16"
    assert capacity.token_bytes == capacity.total_token_bytes == 128 * KIB
    assert capacity.sequence_bytes(8192) == capacity.total_sequence_bytes(8192) == GIB
    assert capacity.page_bytes == 64 * KIB and capacity.block_bytes == 2048 * KIB
    assert capacity.tokens_in(GIB) == 8192 and capacity.sequences_in(3 * GIB - 1, 8192) == 2


@pytest.mark.parametrize(
    ("changes", "attention", "token_bytes"),
    [
        ({"num_key_value_heads": 32}, "MHA", 512 * KIB),
        ({"num_key_value_heads": None}, "MHA", 512 * KIB),
        ({"num_key_value_heads": 1}, "MQA", 16 * KIB),
        ({"num_key_value_heads": None, "num_kv_heads": 8, "head_dim": None}, "GQA", 128 * KIB),
        ({"num_key_value_heads": None, "multi_query": True}, "MQA", 16 * KIB),
        ({"multi_query": True, "new_decoder_architecture": True}, "GQA", 128 * KIB),
        ({"head_dim": 64}, "GQA", 64 * KIB),
    ],
)
def test_heads(changes: dict[str, Any], attention: str, token_bytes: int) -> None:
    capacity = kv_capacity({**LLAMA_8B, **changes})
    assert (capacity.attention, capacity.token_bytes) == (attention, token_bytes)


def test_older_families_name_the_same_sizes_differently() -> None:
    capacity = kv_capacity({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768})
    assert capacity.attention == "MHA" and capacity.token_bytes == 12 * 2 * 768 * 2


def test_mla_keeps_one_latent_on_every_tensor_parallel_rank() -> None:
    one, eight = kv_capacity(DEEPSEEK_V3), kv_capacity(DEEPSEEK_V3, tp=8)
    assert one.attention == "MLA"
    assert one.token_bytes == eight.token_bytes == 61 * (512 + 64) * 2
    assert eight.total_token_bytes == 8 * one.token_bytes


@pytest.mark.parametrize(
    ("asked", "token_bytes"),
    [("auto", 128), ("bf16", 128), ("float16", 128), ("fp16", 128), ("fp32", 256), ("fp8", 64), ("fp8_e5m2", 64)],
)
def test_kv_dtype_scales_the_bytes(asked: str, token_bytes: int) -> None:
    assert kv_capacity(LLAMA_8B, kv_dtype=asked).token_bytes == token_bytes * KIB


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ({**LLAMA_8B, "torch_dtype": "float16"}, "float16"),
        ({**LLAMA_8B, "torch_dtype": "float32"}, "bfloat16"),
        ({**without(LLAMA_8B, "torch_dtype"), "dtype": "float16"}, "float16"),
        (without(LLAMA_8B, "torch_dtype"), "bfloat16"),
        ({"dtype": "float16", "text_config": without(LLAMA_8B, "torch_dtype")}, "float16"),
    ],
)
def test_auto_is_the_type_the_model_is_served_in(config: dict[str, Any], served: str) -> None:
    assert kv_capacity(config).kv_dtype == served


@pytest.mark.parametrize(
    ("tp", "rank", "everywhere"), [(1, 128, 128), (2, 64, 128), (8, 16, 128), (16, 16, 256), (32, 16, 512)]
)
def test_tensor_parallel_ranks_divide_heads_and_then_replicate_them(tp: int, rank: int, everywhere: int) -> None:
    capacity = kv_capacity(LLAMA_8B, tp=tp)
    assert (capacity.token_bytes, capacity.total_token_bytes) == (rank * KIB, everywhere * KIB)


@pytest.mark.parametrize(
    ("pp", "sizes"), [(2, (16, 16)), (3, (11, 11, 10)), (5, (6, 6, 7, 7, 6)), (7, (4, 4, 5, 5, 5, 5, 4))]
)
def test_layers_are_divided_over_stages_as_vllm_does(pp: int, sizes: tuple[int, ...]) -> None:
    capacity = kv_capacity(LLAMA_8B, pp=pp)
    assert tuple(len(stage) for stage in capacity.stages) == sizes
    assert capacity.token_bytes == max(sizes) * 4 * KIB
    assert capacity.total_token_bytes == 128 * KIB


def test_layers_with_a_window_keep_the_blocks_the_next_token_can_see() -> None:
    capacity = kv_capacity(GPT_OSS_20B)
    page = 16 * 8 * 2 * 64 * 2
    assert capacity.page_bytes == page
    # 127 tokens before the next one lie in at most 9 blocks of 16.
    assert capacity.sequence_bytes(8192) == page * (12 * 512 + 12 * 9)
    assert capacity.sequence_bytes(100) == page * 24 * 7
    assert capacity.stored_bytes(8192) == page * 24 * 512
    assert capacity.sequences_in(3 * page * 24 * 512 - 1, 8192) == 2
    assert capacity.token_bytes == 24 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "mistral", "sliding_window": 4096}, 32),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"model_type": "gemma2", "sliding_window": 4096}, 16),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, 27),
        ({"model_type": "other", "sliding_window": 1024, "sliding_window_pattern": 4}, 24),
    ],
)
def test_which_layers_have_the_window(changes: dict[str, Any], windows: int) -> None:
    (stage,) = kv_capacity({**LLAMA_8B, **changes}).stages
    assert sum(window is not None for window in stage) == windows


@given(
    tokens=st.integers(1, 5000),
    window=st.integers(1, 600),
    block_tokens=st.integers(1, 64),
    first=st.integers(0, 63),
)
def test_a_window_never_needs_more_blocks_than_counted(tokens: int, window: int, block_tokens: int, first: int) -> None:
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": window}
    capacity = kv_capacity(config, block_tokens=block_tokens)
    seen = range(max(0, tokens - (window - 1)), tokens)
    blocks = {token // block_tokens for token in seen}
    assert len(blocks) * capacity.block_bytes <= capacity.sequence_bytes(tokens)
    assert capacity.sequence_bytes(tokens) <= (len(blocks) + 1) * capacity.block_bytes


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "num_hidden_layers"),
        (without(LLAMA_8B, "num_attention_heads"), "num_attention_heads"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "'32'"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, r"\[8, 4\]"),
        ({**LLAMA_8B, "hidden_size": 4095}, "head_dim"),
        ({**LLAMA_8B, "v_head_dim": 64}, "v_head_dim"),
        ({**LLAMA_8B, "mamba_d_state": 16}, "mamba_d_state"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA_8B, "model_type": "novel", "sliding_window": 512}, "novel.*layer_types"),
        ({**GPT_OSS_20B, "layer_types": ["full_attention"] * 23}, "23 layers.*24"),
        ({**GPT_OSS_20B, "layer_types": ["full_attention", "linear_attention"] * 12}, "linear_attention"),
        (without(GPT_OSS_20B, "sliding_window"), "sliding_window"),
        ({**LLAMA_8B, "torch_dtype": "int8"}, "int8.*--kv-dtype"),
        ({**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "--kv-dtype fp8"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_capacity(config)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"tp": 3}, "32 attention heads"),
        ({"pp": 33}, "33 stages for 32 layers"),
        ({"block_tokens": 0}, "block size is 0"),
        ({"kv_dtype": "int4"}, "'int4'.*auto.*fp8"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_capacity(LLAMA_8B, **arguments)


def test_kv_heads_that_divide_unevenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 KV heads"):
        kv_capacity({**LLAMA_8B, "num_attention_heads": 48, "hidden_size": 6144, "num_key_value_heads": 12}, tp=8)


def test_config_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert load_config(tmp_path) == load_config(file) == LLAMA_8B


@pytest.mark.parametrize(("content", "says"), [("{", "not JSON"), ("[1]", "JSON list"), (None, "cannot be read")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path)
