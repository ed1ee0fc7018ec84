"""Which blocks are saved while tokens are only guessed, or known later than they were scheduled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from layerstream.jobs import JobKind
from tests.rigs.fuzz_rig import FuzzRig
from tests.rigs.held_jobs import HeldJobs
from tests.rigs.scheduler_rig import BLOCK

MakeRig = Callable[..., FuzzRig]

ASYNCHRONOUS = pytest.mark.parametrize("asynchronous", [False, True], ids=["one step", "two steps in flight"])


def tokens(count: int) -> list[int]:
    return [2 + i * 37 % 900 for i in range(count)]


def watched(rig: FuzzRig) -> HeldJobs:
    jobs = HeldJobs(rig)
    jobs.holding = False
    return jobs


@ASYNCHRONOUS
@pytest.mark.parametrize("second_runner", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_saved_once_and_only_when_all_its_tokens_were_accepted(
    make_stepping_rig: MakeRig, asynchronous: bool, second_runner: bool, seed: int
) -> None:
    rig = make_stepping_rig(
        drafts=5, asynchronous=asynchronous, second_runner=second_runner, seed=seed, slots=24, chunk_blocks=1
    )
    observe, known = rig.coordinator.observe, [0]

    def checked(name: str, hashes: Any, computed: int, block_ids: Any, **more: Any) -> None:
        # Whatever is guessed stays above the tokens that are known.
        assert computed <= rig.requests[name].num_tokens
        known.append(rig.requests[name].num_tokens)
        observe(name, hashes, computed, block_ids, **more)

    rig.coordinator.observe = checked  # type: ignore[method-assign,assignment]
    jobs = watched(rig)
    rig.add("a", tokens(20), max_tokens=200)
    rig.settle()
    assert {later - earlier for earlier, later in itertools.pairwise(known)} >= set(range(1, 7)), "0 to 5 were right"
    saved = [block for job in jobs.of(JobKind.SAVE) for block in job.block_ids]
    # KV of the last token was never computed.
    assert len(saved) == len(set(saved)) == 219 // BLOCK
    answer = list(rig.requests["a"].all_token_ids)
    rig.forget_cached()
    rig.coordinator.take_stats()
    # Under the hashes that a prompt of the same tokens has; every byte that is read is checked.
    rig.add("cold", answer, max_tokens=1)
    rig.settle()
    assert rig.coordinator.take_stats().hit_tokens == 219 // BLOCK * BLOCK


@ASYNCHRONOUS
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("save_decode", [True, False])
def test_what_fills_a_block_in_a_requests_last_step_is_saved_or_left_out(
    make_stepping_rig: MakeRig, asynchronous: bool, drafts: int, save_decode: bool
) -> None:
    rig = make_stepping_rig(asynchronous=asynchronous, drafts=drafts, save_decode=save_decode, slots=24, chunk_blocks=1)
    for prompt in range(2 * BLOCK - 2, 2 * BLOCK + 2):
        for answer in (1, 2, 3):
            ids = [1 + prompt, 1 + answer, *tokens(prompt - 2)]
            name = f"{prompt} {answer}"
            rig.coordinator.take_stats()
            rig.add(name, ids, max_tokens=answer)
            rig.settle()
            full = (prompt + answer - 1 if save_decode else prompt) // BLOCK
            # A block that only a request's last step fills is no longer known when two steps are in flight.
            least = prompt // BLOCK if drafts or asynchronous else full
            assert least <= rig.coordinator.take_stats().saved_blocks <= full
