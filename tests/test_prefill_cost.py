from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerstream.errors import ConfigError
from layerstream.prefill_cost import prefill_cost

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 100,
}


def test_a_token_of_llama_8b_takes_two_operations_for_each_of_its_seven_billion_weights() -> None:
    cost = prefill_cost(LLAMA_8B)
    # 8.03 billion parameters, less the embedding and the output layer of 128,256 * 4096 each.
    assert cost.token / 2 == pytest.approx(8.03e9 - 2 * 128_256 * 4096, rel=2e-3)


def test_attention_grows_with_the_square_of_the_prompt() -> None:
    cost = prefill_cost(LLAMA_8B)
    tokens = 1000
    pairs = tokens * (tokens + 1) / 2
    assert cost.flops(tokens) == tokens * cost.token + 32 * pairs * 4 * 32 * 128


def test_a_window_limits_what_a_token_attends_to() -> None:
    cost = prefill_cost({**SMALL, "sliding_window": 10})
    for tokens in (0, 1, 9, 10, 11, 100):
        pairs = sum(min(token + 1, 10) for token in range(tokens))
        assert cost.flops(tokens) == tokens * cost.token + 2 * pairs * 4 * 64


def test_layers_with_and_without_a_window_add_up() -> None:
    mixed = {**SMALL, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 10}
    one = prefill_cost({**SMALL, "sliding_window": 10}).flops(50) + prefill_cost(SMALL).flops(50)
    assert 2 * prefill_cost(mixed).flops(50) == one


def test_many_lengths_at_once() -> None:
    cost = prefill_cost(SMALL)
    assert cost.flops([1, 20]).tolist() == [float(cost.flops(1)), float(cost.flops(20))]
    assert cost.flops(np.zeros(0, np.int64)).shape == (0,)


def linear(**changes: Any) -> float:
    return prefill_cost({**SMALL, **changes}).token / 2


ATTENTION = 2 * 64 * 16 * (4 + 4 + 2 + 2)


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, 2 * 3 * 64 * 100),
        ({"model_type": "starcoder2"}, 2 * 2 * 64 * 100),
        ({"model_type": "gpt2", "intermediate_size": None}, 2 * 2 * 64 * 256),
        ({"num_experts_per_tok": 2}, 2 * 3 * 64 * 200),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 30, "n_shared_experts": 1}, 2 * 3 * 64 * 90),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 30, "shared_expert_intermediate_size": 5}, 2 * 192 * 65),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 30, "first_k_dense_replace": 1}, 3 * 64 * (100 + 60)),
    ],
)  # fmt: skip
def test_of_a_feed_forward_counts_what_one_token_is_multiplied_with(changes: dict[str, Any], weights: int) -> None:
    assert linear(**changes) == ATTENTION + weights


@pytest.mark.parametrize("rank", [None, 24])
def test_mla(rank: int | None) -> None:
    changes = {
        "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "q_lora_rank": rank,
    }  # fmt: skip
    cost = prefill_cost({**SMALL, **changes})
    queries = 64 * 4 * 24 if rank is None else rank * (64 + 4 * 24)
    weights = queries + 64 * (32 + 8) + 32 * 4 * (16 + 12) + 4 * 12 * 64
    assert cost.token / 2 == 2 * (weights + 3 * 64 * 100)
    assert cost.pair == 2 * 4 * (24 + 12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None, "head_dim": 16}, "`hidden_size` is None"),
        ({"intermediate_size": "big"}, "`intermediate_size` is 'big'"),
        ({"num_experts_per_tok": 2.5}, "`num_experts_per_tok` is 2.5"),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, "`qk_nope_head_dim` is None"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prefill_cost({**SMALL, **changes})
