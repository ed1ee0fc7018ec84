"""An engine as tiers see it that keep portable objects: one object for each group of KV heads and pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerstream.canonical import VERSION
from layerstream.errors import GeometryError
from layerstream.identity import PortableNamespace
from layerstream.tiers.base import IndexSite

if TYPE_CHECKING:
    from layerstream.identity import Namespace
    from layerstream.jobs import PortableRank, RankInfo


def portable_site(ranks: Sequence[RankInfo], namespace: Namespace, *, chunk_blocks: int) -> IndexSite:
    """Put together what the ranks hold.

    Args:
        ranks: of the engine.
        namespace: of the engine; `hash_block_tokens` is of the hashes that name objects.
        chunk_blocks: blocks in a chunk.

    Raises:
        GeometryError: ranks have different numbers of groups, differ in what a stage holds, or some group is nowhere.
    """
    said = [rank.portable for rank in ranks if rank.portable is not None]
    stages: dict[int, PortableRank] = {}
    for its in said:
        stages.setdefault(its.stage, its)
    held = {(its.stage, group) for its in said for group in range(its.first, its.first + its.held)}
    count = max((its.count for its in said), default=0)
    wanted = {(stage, group) for stage in range(namespace.pp_size) for group in range(count)}
    if held != wanted or not wanted or any(_stage(its) != _stage(stages[its.stage]) for its in said):
        raise GeometryError(
            f"{len(said)} ranks hold {len(held)} of {len(wanted)} parts of portable chunks, or differ in what these "
            "are; portable chunks need each pipeline stage to hold all of its KV heads, and as many as the others; "
            "turn the option portable off"
        )
    parts = [stages[stage] for stage in sorted(stages) for _ in range(count)]
    return IndexSite(
        namespace=PortableNamespace.of(
            namespace, canonical_version=VERSION, stages=[stages[stage].digest for stage in sorted(stages)]
        ).digest(),
        chunk_blocks=chunk_blocks,
        block_bytes=tuple(part.block_bytes for part in parts),
        header_bytes=tuple(part.header_bytes for part in parts),
    )


def _stage(its: PortableRank) -> tuple[object, ...]:
    """What ranks of one stage have in common."""
    return its.digest, its.count, its.block_bytes, its.header_bytes
