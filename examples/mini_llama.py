"""A small Llama in plain torch over a paged KV cache: the model of `mini_engine.py`.

Tokens of several sequences come flattened; a sequence's KV lies in blocks that its table names. All shapes are static
for given sizes of the inputs and nothing asks the device for a value, so the forward can be captured in CUDA graphs.
Block 0 belongs to nobody: padded tokens write there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels that take K and V whose heads are repeated by a stride of 0. Flash attention is a CPU's; a GPU's takes no
mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama; the defaults are tiny."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 256
    vocab: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """The shape that a Hugging Face `config.json` describes; RoPE without scaling."""
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            norm_eps=config["rms_norm_eps"],
        )


class Context(NamedTuple):
    """What every layer of one forward shares. T tokens, C keys: all slots of all tables, one sequence after another."""

    cos: torch.Tensor
    """`[T, head_dim]`."""
    sin: torch.Tensor
    """`[T, head_dim]`."""
    slots: torch.Tensor
    """`int64[T]`: where a token's K and V go, block * tokens in a block + offset."""
    pages: torch.Tensor
    """`int64[C / tokens in a block]`: the blocks of all tables."""
    mask: torch.Tensor
    """`bool[1, 1, T, C]`: keys that a token sees."""


class PagedAttention(nn.Module):
    """Writes the step's K and V of one layer into its cache, and attends to what the tables name.

    `cache` is `[blocks, 2, tokens in a block, kv_heads, head_dim]`: K, then V.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        """`q[T, heads, head_dim]`, `k` and `v[T, kv_heads, head_dim]` to `[T, heads * head_dim]`."""
        tokens, heads, width = q.shape
        kv_heads = k.shape[1]
        block, offset = context.slots // self.cache.shape[2], context.slots % self.cache.shape[2]
        keys, values = self.cache[:, 0], self.cache[:, 1]
        keys[block, offset] = k
        values[block, offset] = v
        # KV heads as the batch, so that a group's query heads read one K and V without copies of them.
        group = q.view(tokens, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
        seen_keys, seen_values = (
            side[context.pages].flatten(0, 1).permute(1, 0, 2).unsqueeze(1).expand(-1, heads // kv_heads, -1, -1)
            for side in (keys, values)
        )
        attended = functional.scaled_dot_product_attention(group, seen_keys, seen_values, attn_mask=context.mask)
        return attended.permute(2, 0, 1, 3).reshape(tokens, heads * width)


class Layer(nn.Module):
    """One decoder layer; its submodules are named as Hugging Face's, but for `attention`."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.attention = PagedAttention()
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """`[T, hidden]` to the same."""
        normed = self.input_layernorm(x)
        q = _rotate(self.q_proj(normed).view(-1, self.shape.heads, self.shape.head_dim), context)
        k = _rotate(self.k_proj(normed).view(-1, self.shape.kv_heads, self.shape.head_dim), context)
        v = self.v_proj(normed).view(-1, self.shape.kv_heads, self.shape.head_dim)
        x = x + self.o_proj(self.attention(q, k, v, context))
        normed = self.post_attention_layernorm(x)
        mlp: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return x + mlp


def _rotate(x: torch.Tensor, context: Context) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864), halves of a head paired as in Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * context.cos[:, None] + torch.cat((-second, first), dim=-1) * context.sin[:, None]


class MiniLlama(nn.Module):
    """The whole model, but for its head, which `logits` is."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    @classmethod
    def random(cls, shape: LlamaShape, *, seed: int, device: torch.device, dtype: torch.dtype) -> MiniLlama:
        """Random weights, the same for the same seed on the same kind of device."""
        model = cls._empty(shape, device, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for weight in model.parameters():
            if weight.ndim == 1:
                nn.init.ones_(weight)
            else:
                nn.init.normal_(weight, std=0.02, generator=generator)
        return model

    @classmethod
    def load(cls, folder: Path, *, device: torch.device, dtype: torch.dtype) -> MiniLlama:
        """The Llama in `folder`: `config.json` and one `model.safetensors`."""
        model = cls._empty(
            LlamaShape.of_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))), device, dtype
        )
        weights = _safetensors(folder / "model.safetensors")
        for name, weight in model.named_parameters():
            source = weights.get(_stored_name(name))
            # Where input and output embeddings are tied, only one is stored.
            weight.data.copy_(weights["model.embed_tokens.weight"] if source is None else source)
        return model

    @classmethod
    def _empty(cls, shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> MiniLlama:
        with torch.device("meta"):
            model = cls(shape)
        return model.to(dtype).to_empty(device=device).requires_grad_(False)

    def bind(self, caches: torch.Tensor) -> None:
        """Use `caches[layers, blocks, 2, tokens in a block, kv_heads, head_dim]`."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.attention.cache = cache

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        sequences: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens of S sequences; their K and V go into the caches.

        Args:
            tokens: `int64[T]`.
            positions: `int64[T]`: in their sequence.
            slots: `int64[T]`: see `Context`.
            sequences: `int64[T]`: whose they are, 0 to S - 1.
            tables: `int64[S, M]`: blocks of a sequence in order; the rest is 0.

        Returns:
            `[T, hidden]`.
        """
        x = self.embed_tokens(tokens)
        context = self._context(positions, slots, sequences, tables, x.dtype)
        with sdpa_kernel(ATTENTION):
            for layer in self.layers:
                x = layer(x, context)
        return x

    def _context(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        sequences: torch.Tensor,
        tables: torch.Tensor,
        dtype: torch.dtype,
    ) -> Context:
        width, device = self.shape.head_dim, positions.device
        pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        angles = positions[:, None].float() * self.shape.rope_theta ** (-pairs / width)
        angles = torch.cat((angles, angles), dim=-1)
        capacity = tables.shape[1] * self.layers[0].attention.cache.shape[2]
        keys = torch.arange(tables.shape[0] * capacity, device=device)
        mask = (keys // capacity == sequences[:, None]) & (keys % capacity <= positions[:, None])
        return Context(angles.cos().to(dtype), angles.sin().to(dtype), slots, tables.flatten(), mask[None, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` to `[n, vocab]`."""
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out


def _stored_name(name: str) -> str:
    """Hugging Face's name of a parameter."""
    if name.startswith("lm_head"):
        return name
    for group, parts in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for part in parts:
            name = name.replace(f".{part}_proj.", f".{group}.{part}_proj.")
    return f"model.{name}"


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped: 8 bytes of header length, a JSON header, then the bytes."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    mapped = np.memmap(file, dtype=np.uint8, mode="c")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: torch.from_numpy(mapped[start + about["data_offsets"][0] : start + about["data_offsets"][1]])
        .view(kinds[about["dtype"]])
        .view(about["shape"])
        for name, about in header.items()
    }
