"""What computing a prompt costs, from a model's Hugging Face `config.json` alone.

Counted are the floating point operations of the matrix products, two for each multiplication and addition (Kaplan et
al. 2020, arXiv 2001.08361, section 2.1; Hoffmann et al. 2022, arXiv 2203.15556, appendix F). A token costs

    2 * (weights it is multiplied with)  +  2 * heads * (key elements + value elements) * (tokens it attends to)

for each layer: the first part is the same for every token, the second grows with its position, so the later a token is
in the prompt, the more is saved by not computing it. Left out are norms, activations, rotary embeddings, and the
output layer, which a prefill computes for one token. A share of it is a share of the time as far as the rate is even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layerstream.capacity import kv_capacity
from layerstream.errors import ConfigError

# Families whose feed-forward has two matrices; all others have a gate too, and three.
_WITHOUT_GATE = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron", "opt", "phi", "starcoder2"}
)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Operations of a prefill."""

    token: float
    """Of one token in all layers, without attention's products of tokens with tokens."""
    pair: float
    """Of one token with one that it attends to, in one layer."""
    windows: tuple[int | None, ...]
    """Most tokens that a token attends to, itself included, for each layer; None sets no limit."""

    def flops(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Operations to compute the first `tokens` tokens of a prompt; any shape."""
        count = np.asarray(tokens, np.float64)
        total = self.token * count
        for window in set(self.windows):
            # Token p attends to min(p, window) tokens, p = 1 .. count.
            near = count if window is None else np.minimum(count, window)
            pairs = near * (near + 1) / 2 + (count - near) * near
            total = total + self.windows.count(window) * self.pair * pairs
        return total


def prefill_cost(config: Mapping[str, Any]) -> PrefillCost:
    """Derive the cost of a model's prefill.

    Args:
        config: the content of a Hugging Face `config.json`; the language part of a multimodal model is found inside.

    Raises:
        ConfigError: the config lacks a key, or describes layers other than plain attention.
    """
    capacity = kv_capacity(config, kv_dtype="bfloat16")
    text = config.get("text_config") or config
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head")
    if capacity.attention == "MLA":
        latent, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
        key, value = _number(text, "qk_nope_head_dim") + rope, _number(text, "v_head_dim")
        narrow = text.get("q_lora_rank") and _number(text, "q_lora_rank")
        queries = narrow * (hidden + heads * key) if narrow else hidden * heads * key
        attention = queries + hidden * (latent + rope) + latent * heads * (key - rope + value) + heads * value * hidden
    else:
        key = value = capacity.head_elements // 2
        attention = hidden * key * (2 * heads + 2 * capacity.rank_heads)
    layers = capacity.layers
    weights = layers * attention + _feed_forward(text, hidden, layers)
    windows = tuple(window for stage in capacity.stages for window in stage)
    return PrefillCost(token=2.0 * weights, pair=2.0 * heads * (key + value), windows=windows)


def _feed_forward(text: Mapping[str, Any], hidden: int, layers: int) -> int:
    """Weights of all layers' feed-forward that one token is multiplied with: those of the experts it is sent to."""
    matrices = 2 if text.get("model_type") in _WITHOUT_GATE else 3
    experts = text.get("num_experts_per_tok")
    if not experts:
        wide = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
        # GPT-2 and Falcon leave the size out where it is four times the hidden one.
        plain = _number(text, *wide) if any(text.get(name) for name in wide) else 4 * hidden
        return layers * matrices * hidden * plain
    expert = _number(text, "moe_intermediate_size", "intermediate_size")
    width = _number(text, "num_experts_per_tok") * expert
    width += (text.get("n_shared_experts") or 0) * expert + (text.get("shared_expert_intermediate_size") or 0)
    dense = min(layers, text.get("first_k_dense_replace") or 0)
    plain = _number(text, "intermediate_size") if dense else 0
    return matrices * hidden * ((layers - dense) * width + dense * plain)


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that is there; the others are what other families call the same thing."""
    value = next((text[name] for name in names if text.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"what a prefill costs cannot be told: the config's `{names[0]}` is {value!r}; a whole number of at least "
            "1 is needed"
        )
    return value
