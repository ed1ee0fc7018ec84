"""Objects of a prompt that a tier has already and others that it lacks: all of them are there afterwards, and right."""

from __future__ import annotations

import itertools

import pytest

from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import TieringRig, chain

OBJECTS, K = 5, 4
PROMPT = chain(range(OBJECTS * K))


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=OBJECTS)), ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_whichever_objects_a_tier_has_already_it_has_all_of_them_in_the_end(
    present: tuple[bool, ...], world: int
) -> None:
    rig = TieringRig(FakeTier(world=world), world=world)
    tier, objects = rig.tiers[0], rig.objects(PROMPT)
    for one, there in zip(objects, present, strict=True):
        if there:
            tier.put(one, PROMPT)
    head = next((place for place, there in enumerate(present) if not there), OBJECTS)
    assert rig.serve("a", PROMPT) == head * K, "what lies behind a hole is no hit"
    for rank in tier.ranks:
        assert rank == {one.key: tuple(PROMPT[one.start : one.start + K]) for one in objects}
    assert rig.serve("b", PROMPT) == OBJECTS * K
    rig.check_idle()
