"""CUDA graphs on the CPU: what is captured is not run, a replay runs it on the same tensors, and mistakes show.

While a piece is captured every aten operation is kept with its real operands. An operation that writes to its operands
is not carried out, as on a GPU; others are, for the shapes of their results, which are then overwritten with garbage
when the capture ends. A replay carries all of them out again and puts the results where they were. What a capture
decided in Python therefore stays decided, a tensor made outside keeps being read where it was, and results of the last
replay are overwritten by the next. Asking for a value is an error, as it is while a stream is capturing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
"""Operations whose result the host needs before it can go on."""


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation to the piece that is being captured."""

    def __init__(self, piece: FakePiece) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._piece = piece

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._piece.keep(func, args, kwargs or {})


class FakePiece:
    """One captured graph."""

    def __init__(self) -> None:
        self.replays = 0
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.mode = _Keeping(self)

    def keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket.__name__ in ASKING:
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        if func._schema.is_mutable:
            self.operations.append((func, args, kwargs, []))
            written = [
                kwargs.get(argument.name, args[at] if at < len(args) else None)
                for at, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(func._schema.returns) == 1 else tuple(written[: len(func._schema.returns)])
        result = func(*args, **kwargs)
        operands = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        made = _tensors(result)
        # A view is not computed again: it is where its operand is.
        if not all(tensor.untyped_storage().data_ptr() in operands for tensor in made):
            self.operations.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        self.replays += 1
        # In this mode also what was made in it may be written to.
        with torch.inference_mode():
            for func, args, kwargs, made in self.operations:
                results = _tensors(func(*args, **kwargs))
                for target, value in zip(made, results, strict=False):
                    target.copy_(value)

    def spoil(self) -> None:
        """Nothing that was captured has been computed yet."""
        for *_, made in self.operations:
            for tensor in made:
                tensor.fill_(True if tensor.dtype is torch.bool else 77)


class FakeGraphs:
    """See `layerstream.graphs.capture.GraphApi`."""

    def __init__(self) -> None:
        self.pieces: list[FakePiece] = []
        self.capturing: FakePiece | None = None
        self._is_aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        first = len(self.pieces)
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            assert self.capturing is None
            for piece in self.pieces[first:]:
                piece.spoil()

    def begin(self) -> FakePiece:
        assert self._is_aside and self.capturing is None
        self.capturing = FakePiece()
        self.capturing.mode.__enter__()  # type: ignore[no-untyped-call]
        return self.capturing

    def end(self, piece: FakePiece) -> None:
        assert piece is self.capturing
        self.abandon()
        self.pieces.append(piece)

    def abandon(self) -> None:
        if self.capturing is not None:
            self.capturing.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.capturing = None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
