"""Random LoRA adapters for the tiny Llama, in the files that peft writes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
HIDDEN, HEADS_WIDTH, LAYERS = 256, 256, 8


def write_adapter(folder: Path, *, seed: int) -> Path:
    """An adapter of every layer's key and value projections, large enough to change what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = ["k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "tiny",
                "r": RANK,
                "lora_alpha": RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": modules,
                "inference_mode": True,
            }
        )
    )
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=dice) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(HEADS_WIDTH, RANK, generator=dice) * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
