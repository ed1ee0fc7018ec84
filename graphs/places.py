"""What captured graphs rely on to stay as it was: addresses of tensors, and the hooks that were there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerstream.errors import GraphError


class Fixtures:
    """Parameters, buffers and forward hooks of a module and all below it, and further tensors, as they are now.

    Asked before every replay, so it costs about a tenth of a microsecond for each.
    """

    def __init__(self, module: torch.nn.Module, further: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """
        Args:
            module: whose graphs these are.
            further: gives other tensors that its graphs use, by name.
        """
        self._further = further
        self._addresses = _addresses(further())
        self._tensors: list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int, str]] = []
        self._hooks: list[tuple[Mapping[int, Any], tuple[int, ...], str]] = []
        for path, part in module.named_modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        where = f"{path}.{name}" if path else name
                        self._tensors.append((held, name, tensor, tensor.data_ptr(), where))
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                self._hooks.append((hooks, tuple(hooks), path or type(module).__name__))

    def check(self) -> None:
        """Find out whether a replay would still be right.

        Raises:
            GraphError: something moved or changed; the message names it.
        """
        for held, name, tensor, address, where in self._tensors:
            if held.get(name) is not tensor or tensor.data_ptr() != address:
                raise _moved(where)
        for hooks, numbers, where in self._hooks:
            if (hooks or numbers) and tuple(hooks) != numbers:
                raise GraphError(
                    f"forward hooks of {where} changed since the capture, and a replay runs the old ones; call "
                    "forget() and capture again"
                )
        if (found := _addresses(self._further())) != self._addresses:
            names = {**found, **self._addresses}
            raise _moved(", ".join(name for name in names if found.get(name) != self._addresses.get(name)))


def _moved(what: str) -> GraphError:
    return GraphError(
        f"{what} moved since the capture, and graphs hold addresses; keep it in place, or call forget() and capture "
        "again"
    )


def _addresses(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
