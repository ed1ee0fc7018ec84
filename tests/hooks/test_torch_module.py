"""Hooks around the attention of any torch module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerstream.errors import ConfigError
from layerstream.hooks.layer_gate import LayerGate
from layerstream.hooks.torch_module import attach


class Attention(nn.Module):
    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__()
        self._name, self._calls = name, calls

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self._calls.append(f"read {self._name}")
        return x * scale


class Model(nn.Module):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.ModuleDict({"attention": Attention(f"a{i}", calls)}) for i in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.attention(x, scale=2.0)
        return x


class Calls:
    """An engine that keeps what it was called with."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def wait_layer(self, layer: int) -> None:
        self._calls.append(f"wait {layer}")

    def save_layer(self, layer: int) -> None:
        self._calls.append(f"save {layer}")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def model(calls: list[str]) -> Model:
    return Model(calls)


@pytest.fixture
def gate(calls: list[str]) -> LayerGate:
    engine: Any = Calls(calls)
    return LayerGate(engine, ["first", "second"])


LAYERS = {"layers.0.attention": "first", "layers.1.attention": "second"}


def test_each_layer_waits_before_it_reads_and_saves_after_it_wrote(
    model: Model, gate: LayerGate, calls: list[str]
) -> None:
    attach(model, gate, LAYERS)
    out = model(torch.ones(2))
    assert calls == ["wait 0", "read a0", "save 0", "wait 1", "read a1", "save 1"]
    assert out.tolist() == [4.0, 4.0]


def test_a_wait_comes_before_hooks_that_were_there_already(model: Model, gate: LayerGate, calls: list[str]) -> None:
    model.get_submodule("layers.0.attention").register_forward_pre_hook(lambda *_: calls.append("other"))
    attach(model, gate, {"layers.0.attention": "first"})
    model(torch.ones(1))
    assert calls[:3] == ["wait 0", "other", "read a0"]


def test_removed_hooks_are_gone(model: Model, gate: LayerGate, calls: list[str]) -> None:
    attachment = attach(model, gate, LAYERS)
    attachment.remove()
    attachment.remove()
    model(torch.ones(1))
    assert calls == ["read a0", "read a1"]


def test_a_name_that_is_no_submodule_attaches_nothing(model: Model, gate: LayerGate, calls: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"Model has no submodule layers\.7\.attention; use names"):
        attach(model, gate, {**LAYERS, "layers.7.attention": "second"})
    with pytest.raises(ConfigError, match=r"the gate has no layer third; its layers are first, second$"):
        attach(model, gate, {"layers.0.attention": "first", "layers.1.attention": "third"})
    with pytest.raises(ConfigError, match="no layers"):
        attach(model, gate, {})
    model(torch.ones(1))
    assert calls == ["read a0", "read a1"]


def test_an_attention_that_fails_is_not_saved(model: Model, gate: LayerGate, calls: list[str]) -> None:
    attach(model, gate, LAYERS)
    with pytest.raises(TypeError):
        model("not a tensor")
    assert calls == ["wait 0", "read a0"]
