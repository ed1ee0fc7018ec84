from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerstream.errors import GeometryError
from layerstream.jobs import PortableRank, RankInfo
from layerstream.tiers.portable_site import portable_site
from tests.test_identity import BASE

HELD = PortableRank(digest="layers", stage=0, count=4, first=0, held=4, block_bytes=512, header_bytes=4096)


def ranks(*held: PortableRank | None) -> list[RankInfo]:
    common: dict[str, Any] = {
        "pool_slots": 1, "chunk_blocks": 4, "layers": 2, "block_bytes": 7, "pinned": False, "device": "cpu",
        "geometry": "g", "attention_backend": "b", "isa": None,
    }  # fmt: skip
    return [RankInfo(rank=number, portable=its, keeps=its is not None, **common) for number, its in enumerate(held)]


def site(*held: PortableRank | None, pp_size: int = 1) -> Any:
    return portable_site(ranks(*held), replace(BASE, pp_size=pp_size), chunk_blocks=4)


def test_an_engine_has_one_object_for_each_group_whatever_its_ranks() -> None:
    one, two = site(HELD), site(replace(HELD, held=2), replace(HELD, first=2, held=2))
    four = site(*(replace(HELD, first=first, held=1) for first in (2, 0, 3, 1)))
    assert one == two == four
    assert (one.block_bytes, one.header_bytes, one.chunk_blocks) == ((512,) * 4, (4096,) * 4, 4)


def test_ranks_with_the_same_group_count_once() -> None:
    latent = replace(HELD, count=1, held=1)
    assert site(latent) == site(latent, None, None) == site(latent, latent)


def test_stages_follow_each_other() -> None:
    second = replace(HELD, stage=1, digest="other layers", block_bytes=1024, header_bytes=8192)
    its = site(second, HELD, pp_size=2)
    assert its.block_bytes == (512,) * 4 + (1024,) * 4 and its.header_bytes == (4096,) * 4 + (8192,) * 4
    assert its.namespace != site(HELD).namespace


def test_what_a_stage_holds_is_in_every_name() -> None:
    assert site(HELD).namespace != site(replace(HELD, digest="others")).namespace


@pytest.mark.parametrize(
    "held",
    [
        [],
        [None],
        [replace(HELD, held=2)],
        [replace(HELD, held=2), replace(HELD, first=2, held=1)],
        [replace(HELD, held=2), replace(HELD, first=2, held=2, digest="others")],
        [HELD, replace(HELD, header_bytes=8192)],
        [HELD, replace(HELD, block_bytes=1)],
        [HELD, replace(HELD, stage=1)],
        [HELD, replace(HELD, count=5, held=5)],
    ],
    ids=repr,
)
def test_ranks_that_make_no_whole_are_refused(held: list[PortableRank | None]) -> None:
    with pytest.raises(GeometryError, match=r"parts of portable chunks.* turn the option portable off"):
        site(*held)


def test_stages_with_other_numbers_of_heads_are_refused() -> None:
    with pytest.raises(GeometryError, match="6 of 8 parts"):
        site(HELD, replace(HELD, stage=1, count=2, held=2), pp_size=2)
