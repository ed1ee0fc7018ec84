"""Names of a framework's layers, mapped to the engine's: the two calls a model makes around each attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstream.engine import StreamEngine


class LayerGate:
    """Hooks of one model. Both may be called any number of times a step, in any order of layers.

    A layer the engine does not move (it shares another layer's KV, or holds none) passes freely.
    """

    def __init__(self, engine: StreamEngine, names: Sequence[str]) -> None:
        """
        Args:
            engine: the worker half.
            names: per layer of the engine's geometry, the framework's name.
        """
        self._engine = engine
        self.names = tuple(names)
        self._index = {name: index for index, name in enumerate(names)}

    def before(self, name: str) -> None:
        """Call before a layer's attention reads its KV.

        Raises:
            TransferError: the layer's bytes did not arrive.
        """
        index = self._index.get(name)
        if index is not None:
            self._engine.wait_layer(index)

    def capture(self, name: str) -> None:
        """Call in place of `before` while a graph of the whole forward is captured."""
        index = self._index.get(name)
        if index is not None and self._engine.in_graph is not None:
            self._engine.in_graph.capture_wait(index)

    def after(self, name: str) -> None:
        """Call once a layer's KV writes of this step are queued."""
        index = self._index.get(name)
        if index is not None:
            self._engine.save_layer(index)
