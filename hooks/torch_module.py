"""Attaches the two layer hooks to any torch module: one before each attention submodule, one after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from layerstream.errors import ConfigError
from layerstream.graphs.breaks import run_eagerly

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class Gate(Protocol):
    """What a layer passes: `layerstream.hooks.layer_gate.LayerGate` is one."""

    names: tuple[str, ...]
    """Layers it knows."""

    def before(self, name: str) -> None:
        """The layer is about to read its KV."""

    def after(self, name: str) -> None:
        """The layer's KV writes of this step are queued."""


class Attachment:
    """The hooks of one `attach`."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take the hooks off. Any number of times."""
        while self._handles:
            self._handles.pop().remove()


def attach(module: torch.nn.Module, gate: Gate, layers: Mapping[str, str]) -> Attachment:
    """Have submodules of `module` pass `gate`.

    `gate.before` comes before a submodule's forward, so that it may read the layer's paged KV, and `gate.after` once
    the forward has queued the step's own writes to it. Whether those writes come before or after the reads is the
    submodule's affair: a load never covers a token that the same step computes. The stream that is current in the
    forward must be the engine's compute stream.

    Attach before a `layerstream.graphs.piecewise.PiecewiseModule` captures the module: the hooks are its breaks.

    Args:
        module: the model.
        gate: of the engine that streams the model's KV (`layerstream.hooks.layer_gate.LayerGate`).
        layers: name of the submodule, as `module.named_modules()` has it, to the layer's name in `gate`.

    Raises:
        ConfigError: a name is not a submodule's, or the gate has no such layer; nothing was attached.
    """
    found = dict(module.named_modules())
    if missing := sorted(set(layers) - set(found)):
        raise ConfigError(
            f"{type(module).__name__} has no submodule {', '.join(missing)}; use names of its named_modules(), such as "
            f"{', '.join(list(found)[1:4])}"
        )
    if unknown := sorted(set(layers.values()) - set(gate.names)):
        raise ConfigError(
            f"the gate has no layer {', '.join(unknown)}; its layers are {', '.join(gate.names[:3])}"
            f"{', ...' if len(gate.names) > 3 else ''}"
        )
    if not layers:
        raise ConfigError("no layers to attach to; name at least one submodule")
    handles = []
    for name, layer in layers.items():
        before, after = partial(gate.before, layer), partial(gate.after, layer)
        # First of all hooks before, and last of all after: another hook may replace what the attention reads.
        handles.append(found[name].register_forward_pre_hook(_passing(before), prepend=True))
        handles.append(found[name].register_forward_hook(_passing(after)))
    return Attachment(handles)


def _passing(call: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        run_eagerly(call)

    return hook
