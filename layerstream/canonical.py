"""The canonical form of KV: the bytes of one layer for a run of tokens, the same whatever pages they came from.

Version 1 is `[KV heads, tokens, key then value]`, dense, without padding, scales or blocks. Heads are numbered as the
model has them, tokens from the start of the run, and a *row* is what one token has in one head: its key, then its
value; or one latent vector where the model keeps no values of their own (MLA: one head, `value_bytes` 0). Elements are
as the engine stores them, little endian, after rotary embedding; they are moved and never converted.

Heads come first because two cuts must be cheap, and this order keeps both in long runs:

- A rank of another tensor-parallel size wants a slice of the heads: one run of `heads * tokens * row` bytes. So the
  canonical forms of the ranks, joined layer by layer, are that of the model, without moving a byte inside.
- Another block size wants other tokens: one run of `tokens * row` bytes in each head, 8 KiB for 16 tokens of 128
  16-bit elements for key and value each. Blocks leave no trace in the form, so any of them can be cut out of it.

With tokens first, a slice of the heads would be one run for each token: 1 KiB for two heads of that model.

Sizes are in bytes and counts in tokens, heads or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from layerstream.errors import GeometryError
from layerstream.geometry import layer_pages

VERSION = 1
"""Raised whenever canonical bytes change their meaning."""
PLAIN_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""Values of vLLM's `kv_cache_dtype` that are known to store plain elements, none of whose scales lie in the cache."""

_AXES = frozenset("shnk")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """What one token has in one KV head."""

    item_bytes: int
    """Bytes of one element: 1, 2 or 4."""
    key_bytes: int
    value_bytes: int
    """0 if keys and values are one."""

    def __post_init__(self) -> None:
        if (
            self.item_bytes not in (1, 2, 4)
            or self.key_bytes < 1
            or self.value_bytes < 0
            or (self.key_bytes | self.value_bytes) % self.item_bytes
        ):
            raise GeometryError(
                f"a row of {self.key_bytes} and {self.value_bytes} bytes in elements of {self.item_bytes}; elements "
                "have 1, 2 or 4 bytes, keys at least one element, and both whole elements"
            )

    @property
    def nbytes(self) -> int:
        return self.key_bytes + self.value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageForm:
    """How rows lie in the packed pages of one layer on one rank (`layerstream.geometry.LayerPages`).

    A page is a dense array of four axes, of which `order` names the outermost first: s kernel blocks, h heads, n tokens
    of a kernel block, k keys and values where they are apart. Innermost are the bytes of a row, or of half of it.
    """

    name: str
    """The layer's name in the engine."""
    row: RowForm
    heads: int
    """KV heads of this rank."""
    splits: int = 1
    """Kernel blocks in a page."""
    split_tokens: int
    """Tokens in a kernel block."""
    parts: int = 1
    """1: a row is one piece. 2: its key and its value are two, equally long."""
    order: str
    """A permutation of "shnk"."""

    def __post_init__(self) -> None:
        if len(self.order) != len(_AXES) or set(self.order) != _AXES:
            raise GeometryError(f"layer {self.name!r}: order {self.order!r} is no permutation of 'shnk'")
        if min(self.heads, self.splits, self.split_tokens) < 1:
            raise GeometryError(
                f"layer {self.name!r}: {self.heads} heads, {self.splits} kernel blocks a page and {self.split_tokens} "
                "tokens in each; all must be at least 1"
            )
        if self.parts != 1 and (self.parts != 2 or self.row.key_bytes != self.row.value_bytes):
            raise GeometryError(
                f"layer {self.name!r}: rows of {self.row.key_bytes} and {self.row.value_bytes} bytes in {self.parts} "
                "parts; parts is 1, or 2 for keys and values that are equally long"
            )

    @property
    def tokens(self) -> int:
        """Tokens in a page."""
        return self.splits * self.split_tokens

    @property
    def part_bytes(self) -> int:
        """Bytes that lie together whatever the order."""
        return self.row.nbytes // self.parts

    @property
    def page_bytes(self) -> int:
        return self.heads * self.tokens * self.row.nbytes

    @property
    def extents(self) -> dict[str, int]:
        """Size of each axis."""
        return {"s": self.splits, "h": self.heads, "n": self.split_tokens, "k": self.parts}

    @property
    def strides(self) -> dict[str, int]:
        """Bytes between neighbours along each axis."""
        strides, step, extents = {}, self.part_bytes, self.extents
        for axis in reversed(self.order):
            strides[axis] = step
            step *= extents[axis]
        return strides


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForm:
    """One layer of a chunk in canonical form: `[heads, tokens, row]`."""

    row: RowForm
    heads: int
    tokens: int

    def __post_init__(self) -> None:
        if min(self.heads, self.tokens) < 1:
            raise GeometryError(f"a chunk of {self.heads} heads and {self.tokens} tokens; both must be at least 1")

    @property
    def nbytes(self) -> int:
        return self.heads * self.tokens * self.row.nbytes


def row_form(
    *,
    name: str,
    kv_cache_dtype: str,
    isa: str | None,
    item_bytes: int,
    key_elements: int,
    value_elements: int,
    content_bytes: int,
    kv_heads: int,
    head_slots: int,
    tokens_per_state: int | Fraction = 1,
) -> RowForm:
    """The rows of a layer, if its pages hold plain ones.

    Args:
        name: the layer, for messages.
        kv_cache_dtype: as the engine is told.
        isa: instruction set that pages are packed for; None if they are not.
        item_bytes: bytes of one element.
        key_elements: of one token and head; of the latent vector with MLA.
        value_elements: likewise; 0 with MLA.
        content_bytes: bytes that a page has for one token and head.
        kv_heads: of this rank.
        head_slots: extent of the page's axis of heads.
        tokens_per_state: tokens that one entry of a page covers.

    Raises:
        GeometryError: the pages are packed in a way that only their engine understands.
    """
    packed = {
        f"kv_cache_dtype {kv_cache_dtype!r} packs its elements": kv_cache_dtype not in PLAIN_DTYPES,
        f"pages are packed for the instruction set {isa}": isa is not None,
        f"{content_bytes} bytes hold {key_elements} + {value_elements} elements of {item_bytes}": (
            content_bytes != (key_elements + value_elements) * item_bytes
        ),
        f"{head_slots} places hold {kv_heads} heads": head_slots != kv_heads,
        f"an entry covers {tokens_per_state} tokens": tokens_per_state != 1,
    }
    if reasons := [reason for reason, applies in packed.items() if applies]:
        raise GeometryError(
            f"layer {name!r}: its KV is packed and only this engine can read it ({'; '.join(reasons)}). Portable "
            "chunks need one plain row of key and value for each token and KV head; turn the option portable off"
        )
    return RowForm(item_bytes=item_bytes, key_bytes=key_elements * item_bytes, value_bytes=value_elements * item_bytes)


def page_form(
    *,
    name: str,
    row: RowForm,
    axes: str,
    shape: Sequence[int],
    strides: Sequence[int],
    num_blocks: int,
    block_tokens: int,
) -> PageForm:
    """How rows lie in the packed pages that `layer_pages` makes of the same view.

    Args:
        name: the layer, for messages.
        row: of the layer.
        axes: what each dimension of the view counts: b kernel blocks, h heads, n tokens, c elements, k keys and values.
            A permutation of "bhnc", where elements are those of the key, then of the value, or of "bkhnc", where there
            are two k, first the keys. b is the first.
        shape: `[num_blocks * splits, ...]`.
        strides: in elements, like `shape`.
        num_blocks: blocks as the scheduler counts them.
        block_tokens: tokens in one of them.

    Raises:
        GeometryError: the view does not hold such rows, or see `layer_pages`.
    """
    sizes = dict(zip(axes, shape, strict=False))
    steps = dict(zip(axes, strides, strict=False))
    if sorted(axes) not in (sorted("bhnc"), sorted("bkhnc")) or axes[0] != "b" or len(axes) != len(shape):
        raise GeometryError(
            f"layer {name!r}: axes {axes!r} of a view {tuple(shape)}; they must be b, then h, n, c and maybe k in any "
            "order, one for each dimension"
        )
    layer_pages(
        name=name, shape=shape, strides=strides, itemsize=row.item_bytes, storage_offset=0, num_blocks=num_blocks
    )
    parts, content = sizes.get("k", 1), sizes["c"] * row.item_bytes
    if content * parts != row.nbytes or parts != (2 if "k" in sizes else 1) or (sizes["c"] > 1 and steps["c"] != 1):
        raise GeometryError(
            f"layer {name!r}: a view {tuple(shape)} of {axes!r} with strides {tuple(strides)} for rows of "
            f"{row.key_bytes} + {row.value_bytes} bytes; dimension c must hold a whole row, or with k a key or a "
            "value, in consecutive elements"
        )
    splits = sizes["b"] // num_blocks
    if splits * sizes["n"] != block_tokens:
        raise GeometryError(
            f"layer {name!r}: {splits} kernel blocks of {sizes['n']} tokens do not make a block of {block_tokens}"
        )
    extents = {"s": splits, "h": sizes["h"], "n": sizes["n"], "k": parts}
    steps |= {"s": steps["b"], "k": steps.get("k", 0)}
    # Geometry packs dimensions in the order of their strides; where those of one entry stand makes no difference.
    order = sorted("shnk", key=lambda axis: steps[axis] if extents[axis] > 1 else 0, reverse=True)
    return PageForm(
        name=name,
        row=row,
        heads=sizes["h"],
        splits=splits,
        split_tokens=sizes["n"],
        parts=parts,
        order="".join(order),
    )
