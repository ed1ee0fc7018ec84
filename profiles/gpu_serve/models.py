"""The models that are served: their folders, and what a plan needs to know of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.errors import ConfigError
from layerstream.model_store import prepare_model, tiny_model

LLAMA8B, SMOLLM2, TINY = "llama8b", "smollm2", "tiny"
NAMES = (LLAMA8B, SMOLLM2, TINY)

LLAMA8B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
"""Shape of Llama 3 8B: "The Llama 3 Herd of Models", 2024, table 3. 16 GB of weights, 128 KiB of KV a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's folder and its shape."""

    name: str
    folder: Path
    dummy: bool
    """It has no weights: vLLM makes some up."""
    positions: int
    """Longest prompt and answer in tokens."""
    vocabulary: int
    kv_elements: int
    """Numbers of KV cache a token, over all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """Something that is planned and cannot be run here."""

    name: str
    reason: str


def wanted(only: str | None, *, cuda: bool, has_smollm2: bool) -> tuple[str, ...]:
    """Names of the models to serve, in order: without `only`, a small one, and on a GPU the large one before it."""
    if only is not None:
        return (only,)
    small = SMOLLM2 if has_smollm2 else TINY
    return (LLAMA8B, small) if cuda else (small,)


def find_model(name: str, folder: Path, *, cuda: bool, say: Callable[[str], None]) -> Model | NotRun:
    """Make a model's folder.

    Args:
        name: one of `NAMES`.
        folder: where models go that are made for one run.
        cuda: whether it is to run on a GPU.
        say: told what takes long.
    """
    if name == LLAMA8B and not cuda:
        return NotRun(name=name, reason="16 GB of weights at a CPU's speed; needs a GPU")
    try:
        if name == LLAMA8B:
            return _read(name, write_llama8b(folder / name), dummy=True)
        if name == SMOLLM2:
            return _read(name, prepare_model(progress=say), dummy=False)
        return _read(name, tiny_model(folder / name), dummy=False)
    except (ConfigError, ImportError) as error:
        return NotRun(name=name, reason=str(error))


def write_llama8b(folder: Path) -> Path:
    """Write `config.json` of an 8B Llama into `folder`, which gets no weights and no tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA8B_CONFIG, indent=2) + "\n", encoding="utf-8")
    return folder


def _read(name: str, folder: Path, *, dummy: bool) -> Model:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return Model(
        name=name,
        folder=folder,
        dummy=dummy,
        positions=int(config["max_position_embeddings"]),
        vocabulary=int(config["vocab_size"]),
        kv_elements=2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim,
    )
