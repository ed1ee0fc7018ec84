"""Room for portable objects, and the way between them and the host pool's pages.

An object in canonical form is other bytes than the pool's pages, so it is moved from and to memory of the I/O threads'
own, and copied between there and the pool by the thread that moves it. A rank has one object for each group of heads
that it holds; a thread moves them one after another through the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from layerstream import relayout
from layerstream.errors import GeometryError
from layerstream.tiers.base import Batch, Item
from layerstream.tiers.objects import ALIGNMENT, Bytes, ObjectFormat
from layerstream.tiers.workspace import PoolPages, chain_before, private_memory

if TYPE_CHECKING:
    from layerstream.canonical import ChunkForm, PageForm
    from layerstream.head_groups import HeadGroups
    from layerstream.host_pool import HostPool
    from layerstream.jobs import TierJob
    from layerstream.portions import Portion


class _Copy(NamedTuple):
    """Rows that pages of the pool and an object share."""

    pages: Bytes
    chunk: Bytes
    page_form: PageForm
    chunk_form: ChunkForm
    portion: Portion


class Bounce:
    """What `Workspace` is for objects whose bytes are the pool's own. Items are in tokens instead of blocks.

    Args:
        pool: the host pool.
        format: pages as in the pool.
        heads: what the pages hold, and how it is cut into objects.
        threads: how many I/O threads there are.
        items: most objects that one thread moves at once.
        nbytes: most bytes that it does, unless one object is larger.

    Raises:
        GeometryError: `heads` does not describe the pool's pages.
    """

    def __init__(
        self,
        pool: HostPool,
        format: ObjectFormat,  # noqa: A002
        heads: HeadGroups,
        *,
        threads: int,
        items: int,
        nbytes: int,
    ) -> None:
        said = [(layer.form.name, layer.form.page_bytes) for layer in heads.layers]
        if (
            said != list(zip(format.layers, format.page_bytes, strict=True))
            or heads.block_tokens != format.block_tokens
        ):
            raise GeometryError("portable chunks of other layers, pages or block sizes than those of the host pool")
        tokens = format.chunk_blocks * format.block_tokens
        self.formats = tuple(
            ObjectFormat(
                layers=format.layers,
                page_bytes=heads.token_bytes,
                chunk_blocks=tokens,
                block_tokens=1,
                rank=number,
                heads=heads.heads,
            )
            for number in heads.numbers
        )
        """Of this rank's objects, one for each group of heads."""
        self._heads, self._block_tokens = heads, format.block_tokens
        self._pages = PoolPages(pool, layers=len(format.layers))
        self._header_bytes = self.formats[0].header_bytes
        # Layers begin at multiples of 4096, as in the pool: see layerstream.relayout.
        sizes = [self._header_bytes, *(-(-tokens * size // ALIGNMENT) * ALIGNMENT for size in heads.token_bytes)]
        *offsets, stride = accumulate(sizes, initial=0)
        self._offsets = offsets[1:]
        self.items = max(1, min(items, nbytes // stride))
        """Most objects in a batch."""
        self.memory = private_memory(threads * self.items * stride)
        """`uint8[n]`: all that is not the pool's."""
        self._rooms = self.memory[: threads * self.items * stride].reshape(threads, self.items, stride)

    def batch(self, job: TierJob, first: int, count: int, *, thread: int, part: int = 0) -> Batch:
        """Room for objects `first .. first + count - 1` of a job. Valid until the thread's next batch.

        Args:
            job: the job.
            first: place of the first object in it.
            count: at most `items`.
            thread: whose memory to use.
            part: place in `formats`.
        """
        sizes = self.formats[part].page_bytes
        items = []
        for each, room in zip(job.objects[first : first + count], self._rooms[thread], strict=False):
            tokens = each.blocks * self._block_tokens
            layers = [
                (room[offset : offset + tokens * size],) for offset, size in zip(self._offsets, sizes, strict=True)
            ]
            named = replace(each, start=each.start * self._block_tokens, blocks=tokens)
            items.append(Item(object=named, header=room[: self._header_bytes], layers=tuple(layers)))
        return Batch(namespace=job.namespace, chain=chain_before(job, first), items=tuple(items), ticket=job.ticket)

    def nbytes(self, blocks: int) -> int:
        """Bytes of this rank's objects for one of so many blocks."""
        return sum(form.nbytes(blocks * self._block_tokens) for form in self.formats)

    def pack(self, job: TierJob, first: int, batch: Batch, *, part: int = 0) -> None:
        """Put the rows of the pool's pages into the batch."""
        for copy in self._copies(job, first, batch, part):
            relayout.pages_to_canonical(copy.chunk, copy.pages, copy.page_form, copy.chunk_form, copy.portion)

    def unpack(self, job: TierJob, first: int, batch: Batch, *, part: int = 0) -> None:
        """Put the batch's rows into the pool's pages, without those of blocks that are skipped."""
        for copy in self._copies(job, first, batch, part):
            relayout.canonical_to_pages(copy.pages, copy.chunk, copy.page_form, copy.chunk_form, copy.portion)

    def close(self) -> None:
        """Let go of the pool's memory; no thread may be at work."""
        self._pages.close()

    def _copies(self, job: TierJob, first: int, batch: Batch, part: int) -> Iterator[_Copy]:
        heads = self._heads
        for number, item in enumerate(batch.items, first):
            done = 0 if number else job.skip * self._block_tokens
            for span in self._pages.spans(job, number):
                tokens = (span.stop - span.start) * self._block_tokens
                for layer, (its, pages, (chunk,)) in enumerate(
                    zip(heads.layers, span.layers, item.layers, strict=True)
                ):
                    size = its.form.page_bytes
                    yield _Copy(
                        pages=pages[span.start * size : span.stop * size],
                        chunk=chunk,
                        page_form=its.form,
                        chunk_form=heads.chunk(layer, item.object.blocks),
                        portion=heads.portion(layer, part, tokens=tokens, chunk_token=done),
                    )
                done += tokens
