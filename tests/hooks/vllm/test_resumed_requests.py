"""A preempted request that comes back: it hits what it had computed, and never more than is known of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.hooks.vllm.test_scheduling import assert_idle
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


@pytest.mark.parametrize(
    ("mode", "chunk_tokens"),
    [("layerwise", BLOCK // 2), ("layerwise", BLOCK), ("layerwise", 4 * BLOCK), ("parked", 2 * BLOCK)],
    ids=str,
)
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_a_resumed_request_loads_prompt_and_answer(
    make_rig: MakeRig, caching: bool, mode: str, chunk_tokens: int
) -> None:
    rig = make_rig(num_blocks=18, prefix_caching=caching, options={"chunk_tokens": chunk_tokens, "load_mode": mode})
    match, offers = rig.connector.get_num_new_matched_tokens, []

    def watch(request: Any, local: int) -> Any:
        answer = match(request, local)
        hit = local + (answer[0] or 0)
        assert 0 <= hit <= request.num_tokens - 1
        offers.append((request.num_preemptions, hit))
        return answer

    rig.connector.get_num_new_matched_tokens = watch
    for number in range(2):
        rig.add(f"r{number}", prompt(4 * BLOCK + number, seed=number), max_tokens=7 * BLOCK)
    rig.run()
    preempted = [request.num_preemptions for request in rig.requests.values()]
    assert min(preempted) == 0 < sum(preempted), "exactly one is to be preempted"
    # vLLM's own cache keeps the head of what it freed; ours has all of it.
    assert max(hit for preemptions, hit in offers if preemptions) > 5 * BLOCK
    for number in range(2):
        assert len(rig.outputs[f"r{number}"]) == 7 * BLOCK
    assert_idle(rig, num_blocks=18)
