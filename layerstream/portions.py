"""Which rows move between pages and canonical chunks: the cuts that another block size or another rank makes."""

from __future__ import annotations

from dataclasses import dataclass

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Which tokens of a prefix and which KV heads of the model some bytes hold."""

    first_head: int
    heads: int
    first_token: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The rows that move between consecutive pages and a chunk: some heads of some tokens, which may start and end
    inside a page. Empty with no heads or no tokens."""

    heads: int
    tokens: int
    page_head: int = 0
    """First head, counted in the pages."""
    page_token: int = 0
    """First token, counted from the first page's first."""
    chunk_head: int = 0
    """First head, counted in the chunk."""
    chunk_token: int = 0
    """First token, counted in the chunk."""

    @classmethod
    def common(cls, pages: Extent, chunk: Extent) -> Portion | None:
        """What pages and a chunk of one prefix both hold; None if that is nothing."""
        head = max(pages.first_head, chunk.first_head)
        token = max(pages.first_token, chunk.first_token)
        heads = min(pages.first_head + pages.heads, chunk.first_head + chunk.heads) - head
        tokens = min(pages.first_token + pages.tokens, chunk.first_token + chunk.tokens) - token
        if heads < 1 or tokens < 1:
            return None
        return cls(
            heads=heads,
            tokens=tokens,
            page_head=head - pages.first_head,
            page_token=token - pages.first_token,
            chunk_head=head - chunk.first_head,
            chunk_token=token - chunk.first_token,
        )

    def check(self, page: PageForm, chunk: ChunkForm, *, pages_bytes: int, chunk_bytes: int) -> None:
        """Refuse a portion that is not inside both sides.

        Args:
            page: of the pages.
            chunk: of the chunk.
            pages_bytes: length of the memory that holds the pages.
            chunk_bytes: length of the memory that holds the chunk.

        Raises:
            GeometryError: it is not, the rows differ, or the chunk is longer than its memory.
        """
        if page.row != chunk.row:
            raise GeometryError(
                f"layer {page.name!r}: pages of {page.row} and a chunk of {chunk.row}; rows must be equal"
            )
        if chunk_bytes < chunk.nbytes:
            raise GeometryError(
                f"layer {page.name!r}: {chunk_bytes} bytes for a chunk of {chunk.nbytes}; pass a longer buffer"
            )
        pages = pages_bytes // page.page_bytes
        for what, first, count, held in (
            ("heads of the pages", self.page_head, self.heads, page.heads),
            (f"tokens of {pages} pages", self.page_token, self.tokens, pages * page.tokens),
            ("heads of the chunk", self.chunk_head, self.heads, chunk.heads),
            ("tokens of the chunk", self.chunk_token, self.tokens, chunk.tokens),
        ):
            if count < 0 or not 0 <= first <= held - count:
                raise GeometryError(
                    f"layer {page.name!r}: {count} {what} from {first} on, and there are {held}; ask for none below 0 "
                    "and none past the last"
                )


def rank_heads(kv_heads: int, *, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """First KV head of a tensor-parallel rank and how many it has, as vLLM deals them out: equal slices in order, or
    one head for several consecutive ranks where there are more ranks than heads.

    Raises:
        GeometryError: heads do not divide evenly.
    """
    if kv_heads < 1 or not 0 <= tp_rank < tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise GeometryError(
            f"rank {tp_rank} of {tp_size} with {kv_heads} KV heads; one number must divide the other, and ranks count "
            "from 0"
        )
    heads = max(1, kv_heads // tp_size)
    return tp_rank * kv_heads // tp_size, heads
