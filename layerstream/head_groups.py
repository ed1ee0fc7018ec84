"""How a model's KV is cut into portable objects: groups of KV heads, whatever ranks hold them.

Group g of G holds KV heads `g * H / G .. (g + 1) * H / G - 1` of each layer, H being the layer's own number of heads in
the whole model and G the greatest number that divides all of them: one head a group, where all layers have as many. So
every rank of every tensor-parallel size that divides the heads holds whole groups. Each pipeline stage has groups of
its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError
from layerstream.identity import canonical_digest
from layerstream.portions import Portion


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """One layer's pages on one rank, and which KV heads of the model they hold."""

    form: PageForm
    first: int
    """First of them, counted in the model."""
    total: int
    """KV heads that the layer has in the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroups:
    """The groups that one rank holds.

    Raises:
        GeometryError: there are no layers, their pages hold different numbers of tokens, or the rank does not hold the
            same whole groups of every layer.
    """

    layers: tuple[LayerHeads, ...]
    stage: int = 0
    """Pipeline stage."""
    writes: bool = True
    """False if another rank with the same heads writes them."""

    def __post_init__(self) -> None:
        if not self.layers or len({layer.form.tokens for layer in self.layers}) > 1:
            raise GeometryError(
                "portable chunks need layers whose blocks hold equally many tokens, and these hold "
                f"{sorted({layer.form.tokens for layer in self.layers})}; turn the option portable off"
            )
        for layer, heads in zip(self.layers, self.heads, strict=True):
            stop = layer.first + layer.form.heads
            if (layer.first, layer.form.heads) != (self.first * heads, self.held * heads) or stop > layer.total:
                raise GeometryError(
                    f"layer {layer.form.name!r}: this rank holds KV heads {layer.first} to {stop - 1} of {layer.total}"
                    f", and {self.layers[0].form.heads} of {self.layers[0].total} of layer "
                    f"{self.layers[0].form.name!r}; portable chunks need each rank to hold the same part of all "
                    "layers; turn the option portable off"
                )

    @property
    def count(self) -> int:
        """Groups of the whole model."""
        return math.gcd(*(layer.total for layer in self.layers))

    @property
    def first(self) -> int:
        """First group of this rank."""
        return self.layers[0].first * self.count // self.layers[0].total

    @property
    def held(self) -> int:
        """Groups of this rank."""
        return self.layers[0].form.heads * self.count // self.layers[0].total

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.layers[0].form.tokens

    @property
    def numbers(self) -> range:
        """Numbers of this rank's objects among those of the whole model."""
        start = self.stage * self.count + self.first
        return range(start, start + self.held)

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of each layer in a group."""
        return tuple(layer.total // self.count for layer in self.layers)

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer that a group has for one token."""
        return tuple(heads * layer.form.row.nbytes for heads, layer in zip(self.heads, self.layers, strict=True))

    def chunk(self, layer: int, tokens: int) -> ChunkForm:
        """Form of one layer of a group's object of so many tokens."""
        return ChunkForm(row=self.layers[layer].form.row, heads=self.heads[layer], tokens=tokens)

    def portion(self, layer: int, place: int, *, tokens: int, chunk_token: int) -> Portion:
        """What consecutive pages and a group's object share.

        Args:
            layer: which.
            place: of the group among those of this rank.
            tokens: in the pages.
            chunk_token: where they begin in the object.
        """
        heads = self.heads[layer]
        return Portion(heads=heads, tokens=tokens, page_head=place * heads, chunk_token=chunk_token)

    def digest(self) -> str:
        """Names what this stage's groups hold, on whatever rank, as hex digits."""
        return canonical_digest(
            [
                [layer.form.name, row.item_bytes, row.key_bytes, row.value_bytes, layer.total]
                for layer in self.layers
                for row in (layer.form.row,)
            ]
        )
