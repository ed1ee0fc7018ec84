"""Steps in which requests of every kind run together: none is served or saved by another's measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt
from tests.rigs.tiering_rig import TieringRig, chain

MakeRig = Callable[..., SchedulerRig]

STEP = 8 * BLOCK
"""Tokens in a step."""


def kinds(output: Any) -> set[str]:
    """What requests do in a step."""
    new = {"loads" if request.num_computed_tokens else "new" for request in output.scheduled_new_reqs}
    old = {
        "decodes" if output.num_scheduled_tokens[name] == 1 else "second chunk"
        for name in output.scheduled_cached_reqs.req_ids
        if name in output.num_scheduled_tokens
    }
    return new | old


def test_every_save_is_whole_in_fifty_steps_of_all_kinds(make_rig: MakeRig) -> None:
    rig = make_rig(step_tokens=STEP, options={"host_gib": 0.004})
    known = prompt(6 * BLOCK + 5, seed=999)
    rig.serve("known", known)
    prompts = {"known": known}
    mixed = 0
    for turn in range(50):
        rig.scheduler.reset_prefix_cache()
        prompts |= {f"long {turn}": prompt(12 * BLOCK + 4, seed=2 * turn), f"new {turn}": prompt(30, seed=2 * turn + 1)}
        rig.add(f"decodes {turn}", known[:5], max_tokens=6)
        rig.step()
        rig.add(f"long {turn}", prompts[f"long {turn}"], max_tokens=2)
        rig.step()
        rig.add(f"loads {turn}", known, max_tokens=2)
        rig.add(f"new {turn}", prompts[f"new {turn}"], max_tokens=2)
        mixed += kinds(rig.step()) == {"loads", "new", "decodes", "second chunk"}
        assert rig.hits[f"loads {turn}"] == 6 * BLOCK
        rig.run()
    assert mixed == 50
    assert_idle(rig)
    assert rig.scheduler.reset_prefix_cache()
    for name, ids in prompts.items():
        assert rig.serve(f"again {name}", ids) == (len(ids) - 1) // BLOCK * BLOCK
    assert_idle(rig)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_request_whose_blocks_find_no_room_takes_none_from_the_others(
    make_rig: MakeRig, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(step_tokens=16 * BLOCK)
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None and coordinator._index is not None
    prompts = [prompt(3 * BLOCK, seed=seed) for seed in range(3)]
    for number, ids in enumerate(prompts):
        rig.add(f"r{number}", ids, max_tokens=2 * BLOCK)
    first = rig.requests[f"r{refused}"].block_hashes[0]
    reserve, asked = coordinator._index.reserve, []

    def full(hashes: Any, *arguments: Any, **more: Any) -> Any:
        asked.append(hashes[0])
        return None if hashes[0] == first else reserve(hashes, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(coordinator._index, "reserve", full)
        assert len(rig.step().num_scheduled_tokens) == 3
    assert len(set(asked)) == 3
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    for number, ids in enumerate(prompts):
        tokens = [*ids, *rig.outputs[f"r{number}"]]
        hit = 0 if number == refused else (len(tokens) - 1) // BLOCK * BLOCK
        assert rig.serve(f"again {number}", tokens) == hit
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("once more", prompts[refused]) == 2 * BLOCK, "it was saved by the request that came after"
    assert_idle(rig)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_what_a_tier_refuses_of_one_request_it_still_gets_of_the_others(refused: int) -> None:
    class Refusing(FakeTier):
        """Has no room for one prompt."""

        def has(self, one: Any) -> bool:
            return one.key in unwanted or super().has(one)

    rig = TieringRig(Refusing(), slots=16)
    prompts = [chain([name, *range(8)]) for name in "abc"]
    unwanted = {one.key for one in rig.objects(prompts[refused])}
    for number, hashes in enumerate(prompts):
        rig.admit(f"r{number}", hashes)
        rig.compute(f"r{number}", hashes)
    rig.turn()
    for number in range(3):
        rig.coordinator.finish(f"r{number}")
    rig.settle()
    kept = set(rig.tiers[0].ranks[0])
    for number, hashes in enumerate(prompts):
        names = {one.key for one in rig.objects(hashes)}
        assert names.isdisjoint(kept) if number == refused else names <= kept
        assert rig.ask("asks", hashes) == len(hashes)
    rig.coordinator.finish("asks")
    rig.check_idle()
