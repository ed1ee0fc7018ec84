"""KV whose every byte is known, in caches of every layout, and the packed pages that the engine would save of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import rearrange

from layerstream.canonical import PageForm, RowForm, page_form
from layerstream.geometry import LayerPages, layer_pages
from layerstream.kernels import reference
from tests.kernels.pages import ids, noise, poisoned


@dataclass(frozen=True)
class Layout:
    axes: str
    """Dimensions as the view has them."""
    memory: str
    """The same, outermost first."""
    splits: int = 1
    gap: int = 0
    """Elements between kernel blocks that belong to nobody; only with b outermost."""

    @property
    def apart(self) -> bool:
        return "k" in self.axes


_WHOLE = {
    "tokens first": Layout("bhnc", "bnhc"),
    "heads first": Layout("bhnc", "bhnc"),
    "heads outermost": Layout("bhnc", "hbnc"),
    "two planes in a block": Layout("bknhc", "bknhc"),
    "two planes outermost": Layout("bknhc", "kbnhc"),
    "two planes in a head": Layout("bkhnc", "bhknc"),
    "two pieces in a row": Layout("bkhnc", "bnhkc"),
}
LAYOUTS = {
    **_WHOLE,
    **{f"{name}, two kernel blocks": replace(layout, splits=2) for name, layout in _WHOLE.items()},
    "tokens first, padded": Layout("bhnc", "bnhc", gap=12),
}
ROWS = {
    "1 byte": RowForm(item_bytes=1, key_bytes=16, value_bytes=16),
    "1 byte, odd": RowForm(item_bytes=1, key_bytes=5, value_bytes=5),
    "2 bytes": RowForm(item_bytes=2, key_bytes=24, value_bytes=24),
    "4 bytes": RowForm(item_bytes=4, key_bytes=12, value_bytes=12),
    "several segments": RowForm(item_bytes=2, key_bytes=142, value_bytes=142),
    "1 byte, short values": RowForm(item_bytes=1, key_bytes=24, value_bytes=7),
    "2 bytes, short values": RowForm(item_bytes=2, key_bytes=48, value_bytes=32),
    "4 bytes, long values": RowForm(item_bytes=4, key_bytes=8, value_bytes=28),
    "latent": RowForm(item_bytes=2, key_bytes=72, value_bytes=0),
}
BLOCKS = (2, 4, 16, 128)
CASES = {
    f"{name}, {of}": (layout, row)
    for name, layout in LAYOUTS.items()
    for of, row in ROWS.items()
    if not layout.apart or row.key_bytes == row.value_bytes
}
"""Every layout with every row that it can hold."""


def content(heads: int, tokens: int, row: RowForm) -> torch.Tensor:
    """`uint8[heads, tokens, row]`: canonical bytes, none of which is `POISON`."""
    return noise(heads * tokens * row.nbytes).reshape(heads, tokens, row.nbytes)


class Cache:
    """A layer's cache that holds `uint8[heads, tokens, row]`, block after block; zeros where there is a gap."""

    def __init__(self, layout: Layout, kv: torch.Tensor, row: RowForm, block_tokens: int) -> None:
        heads, tokens, _ = kv.shape
        self.layout, self.row, self.block_tokens = layout, row, block_tokens
        self.num_blocks = tokens // block_tokens
        parts = 2 if layout.apart else 1
        sizes = {
            "b": self.num_blocks * layout.splits,
            "h": heads,
            "n": block_tokens // layout.splits,
            "k": parts,
            "c": row.nbytes // parts,
        }
        steps, step = {}, 1
        for axis in reversed(layout.memory):
            step += layout.gap * row.item_bytes if axis == "b" else 0
            steps[axis], step = step, step * sizes[axis]
        self.storage = torch.zeros(step, dtype=torch.uint8)
        self._shape, self._strides = [sizes[axis] for axis in layout.axes], [steps[axis] for axis in layout.axes]
        self._named = {axis: sizes[axis] for axis in "bk"}
        self.write(kv)

    @property
    def _view(self) -> torch.Tensor:
        return self.storage.as_strided(self._shape, self._strides)

    def write(self, kv: torch.Tensor) -> None:
        self._view[:] = rearrange(kv, f"h (b n) (k c) -> {self._pattern}", **self._named).reshape(self._shape)

    def read(self) -> torch.Tensor:
        return rearrange(self._view.reshape(self._full), f"{self._pattern} -> h (b n) (k c)")

    @property
    def form(self) -> PageForm:
        return page_form(
            name="rows",
            row=self.row,
            axes=self.layout.axes,
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            **self._elements,
        )

    @property
    def pages(self) -> torch.Tensor:
        """`uint8[blocks * page bytes]` as a save packs them."""
        packed = poisoned(self.num_blocks * self.layer.page_bytes)
        reference.gather_pages(packed, self.storage, self.layer, ids(list(range(self.num_blocks))))
        return packed

    @property
    def layer(self) -> LayerPages:
        return layer_pages(
            name="rows", itemsize=self.row.item_bytes, storage_offset=0, num_blocks=self.num_blocks, **self._elements
        )

    @property
    def _elements(self) -> dict[str, list[int]]:
        """Shape and strides as a tensor of the elements has them."""
        shape, strides = list(self._shape), [stride // self.row.item_bytes for stride in self._strides]
        shape[self.layout.axes.index("c")] //= self.row.item_bytes
        strides[self.layout.axes.index("c")] = 1
        return {"shape": shape, "strides": strides}

    @property
    def _pattern(self) -> str:
        return " ".join(self.layout.axes if self.layout.apart else self.layout.axes.replace("c", "kc"))

    @property
    def _full(self) -> list[int]:
        """The shape with an axis k, whether there are two of it or one."""
        if self.layout.apart:
            return self._shape
        where = self.layout.axes.index("c")
        return [*self._shape[:where], 1, *self._shape[where:]]
