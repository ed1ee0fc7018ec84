"""Where vLLM's own hit ends, where ours does, and where the prompt does, in every combination."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerstream.jobs import JobKind
from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


class Watched:
    """A rig of which one knows what the connector offered, and what it loaded where."""

    def __init__(self, rig: SchedulerRig) -> None:
        self.rig = rig
        self._match, self._allocated = rig.connector.get_num_new_matched_tokens, rig.connector.update_state_after_alloc
        rig.connector.get_num_new_matched_tokens = self._note
        rig.connector.update_state_after_alloc = self._look
        self._jobs = HeldJobs(rig)
        self._jobs.holding = False
        self._offers: list[tuple[int, int | None]] = []
        self._table: list[int] = []
        self._before: list[Any] = []

    def serve(self, name: str, tokens: list[int]) -> tuple[int, int]:
        """Blocks of vLLM's own hit and of ours beyond it; only these were loaded, and no byte before them changed."""
        self._offers.clear()
        self._jobs.jobs.clear()
        hit = self.rig.serve(name, tokens)
        ((local, external),) = self._offers
        assert external is not None and hit == local + external
        assert external >= 0 and hit <= len(tokens) - 1
        loaded = [block for job in self._jobs.of(JobKind.LOAD) for block in job.block_ids]
        assert loaded == self._table[local // BLOCK : hit // BLOCK]
        for cache, before in zip(self.rig.kv[0].values(), self._before, strict=True):
            assert bool((cache[self._table[: local // BLOCK]] == before[: local // BLOCK]).all())
        return local // BLOCK, external // BLOCK

    def make_local(self, tokens: list[int]) -> None:
        """vLLM knows these blocks, and nothing else."""
        assert self.rig.scheduler.reset_prefix_cache()
        if tokens:
            self.rig.serve("local", [*tokens, 1])
            self.rig.hits.clear()

    def _note(self, request: Any, local: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self._match(request, local)
        self._offers.append((local, answer[0]))
        return answer

    def _look(self, request: Any, blocks: Any, external: int) -> None:
        self._table = list(blocks.get_block_ids()[0])
        self._before = [cache[self._table].clone() for cache in self.rig.kv[0].values()]
        self._allocated(request, blocks, external)


@pytest.mark.parametrize("more", [0, 1, BLOCK], ids=["the same prompt", "a token more", "a block more"])
def test_exactly_what_lies_between_vllms_hit_and_ours_is_loaded(make_rig: MakeRig, more: int) -> None:
    """Chunks of 64 tokens; a hit may begin and end inside one."""
    rig = Watched(make_rig())
    seen: set[tuple[int, ...]] = set()
    for stored in (0, 1, 16, 31, 33, 48, 60, 64, 65, 96, 127, 128, 200):
        ids = prompt(stored, seed=stored)
        if stored:
            rig.rig.serve("cold", ids)
            rig.rig.hits.clear()
        for local in range(stored // BLOCK + 1):
            rig.make_local(ids[: local * BLOCK])
            asked = [*ids, *prompt(more, seed=1000 + len(seen))] or [7]
            stop = min(stored, len(asked) - 1) // BLOCK
            found = rig.serve(f"{stored} {local}", asked)
            assert found == (min(local, stop), stop - min(local, stop))
            seen.add((*found, stored, local))
    assert {(0, 0), (0, 1), (2, 1)} <= {found[:2] for found in seen}
    assert_idle(rig.rig)


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize(
    "tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2]
)
def test_a_full_hit_leaves_a_token_to_compute(make_rig: MakeRig, tokens: int, local: int) -> None:
    rig = Watched(make_rig())
    ids = prompt(tokens)
    rig.rig.serve("cold", ids, max_tokens=BLOCK + 2)
    rig.make_local(ids[: min(local, tokens // BLOCK) * BLOCK])
    own, ours = rig.serve("warm", ids)
    assert own + ours == (tokens - 1) // BLOCK
    assert rig.rig.outputs["warm"] == rig.rig.outputs["cold"][:1]
    assert_idle(rig.rig)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
@pytest.mark.parametrize("save_decode", [True, False])
def test_all_that_was_computed_in_small_steps_is_a_hit(make_rig: MakeRig, mode: str, save_decode: bool) -> None:
    rig = make_rig(step_tokens=2 * BLOCK, options={"load_mode": mode, "save_decode": save_decode})
    ids, answer = prompt(20 * BLOCK), 2 * BLOCK + 1
    rig.serve("cold", ids, max_tokens=answer)
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    whole = 22 if save_decode else 20
    assert coordinator.take_stats().saved_blocks == whole
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", [*ids, *rig.outputs["cold"]]) == whole * BLOCK
    assert_idle(rig)
