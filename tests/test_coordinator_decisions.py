"""How much of a hit is loaded: what the coordinator asks, and what it does with the answer."""

from __future__ import annotations

import pytest

from layerstream.decisions import Decision, LoadCase, LoadMode
from layerstream.jobs import JobKind
from tests.rigs.tiering_rig import B, TieringRig, chain

PROMPT = chain(range(8))
MIB = 1 << 20


class Says:
    """Lets so many blocks be loaded, and keeps what it was asked."""

    def __init__(self, blocks: int | None = None) -> None:
        self.blocks = blocks
        self.cases: list[LoadCase] = []
        self.decisions: list[Decision] = []
        """That requests were admitted by."""

    def choose(self, case: LoadCase) -> Decision:
        self.cases.append(case)
        tokens = case.found_tokens if self.blocks is None else min(self.blocks * B, case.found_tokens)
        reason = "recompute" if not tokens else "load_part" if tokens < case.found_tokens else "load"
        return Decision(
            tokens=tokens,
            mode=LoadMode.LAYERWISE,
            release_after_layer=None,
            reason=reason,
            load_s=1.0,
            recompute_s=2.0,
            stall_s=0.5,
        )


def served_once(says: Says) -> TieringRig:
    rig = TieringRig(chooser=says, decided=says.decisions.append)
    rig.serve("first", PROMPT)
    says.cases.clear()
    return rig


@pytest.mark.parametrize(("blocks", "reason"), [(None, "load"), (3, "load_part"), (0, "recompute")])
def test_so_much_is_offered_as_was_decided_and_it_is_counted(blocks: int | None, reason: str) -> None:
    says = Says()
    rig = served_once(says)
    rig.coordinator.take_stats()
    says.blocks = blocks
    loaded = 8 if blocks is None else blocks
    assert rig.ask("a", PROMPT) == loaded
    rig.admit("a", PROMPT, external=loaded)
    rig.plan()
    loads = [job for job in rig.jobs if job.kind is JobKind.LOAD]
    assert [len(job.block_ids) for job in loads] == ([loaded] if loaded else [])
    assert rig.coordinator.take_stats().decisions == {reason: 1}
    rig.turn()
    rig.coordinator.finish("a")
    rig.settle()
    rig.check_idle()


def test_a_request_is_described_as_it_is() -> None:
    says = Says()
    rig = served_once(says)
    rig.coordinator.stepped(["a", "b", "c", "d"], 0.025)
    rig.coordinator.finish("d")
    rig.ask("a", PROMPT, local=2, tokens=8 * B + 7)
    assert says.cases == [
        LoadCase(
            num_tokens=8 * B + 7,
            local_tokens=2 * B,
            found_tokens=6 * B,
            block_tokens=B,
            block_bytes=MIB,
            layers=32,
            queued_bytes=0,
            running=2,
            step_s=0.025,
        )
    ]


def test_loads_that_ranks_have_not_answered_for_are_the_queue() -> None:
    says = Says()
    rig = served_once(says)
    rig.ask("a", PROMPT)
    rig.admit("a", PROMPT, external=8)
    rig.ask("b", PROMPT)
    rig.plan()
    rig.ask("c", PROMPT)
    rig.turn()
    rig.ask("d", PROMPT)
    assert [case.queued_bytes for case in says.cases] == [0, 8 * MIB, 8 * MIB, 0]


def test_saves_are_no_part_of_the_queue() -> None:
    says = Says()
    rig = served_once(says)
    other = chain("other")
    rig.admit("x", other)
    rig.compute("x", other)
    rig.plan()
    rig.ask("a", PROMPT)
    assert says.cases[-1].queued_bytes == 0


def test_a_decision_counts_once_however_often_it_was_asked_for_and_not_if_the_request_went_away() -> None:
    says = Says(3)
    rig = served_once(says)
    rig.coordinator.take_stats()
    for _ in range(5):
        rig.ask("a", PROMPT)
        rig.ask("gone", PROMPT)
    rig.coordinator.finish("gone")
    rig.admit("gone", PROMPT)
    assert rig.coordinator.take_stats().decisions == {}
    rig.admit("a", PROMPT, external=3)
    assert rig.coordinator.take_stats().decisions == {"load_part": 1}
    assert [decision.reason for decision in says.decisions] == ["load_part"]


def test_where_there_is_nothing_to_load_nothing_is_decided() -> None:
    says = Says()
    rig = served_once(says)
    assert rig.ask("a", chain("new")) == 0 and rig.ask("b", PROMPT, local=8) == 0
    rig.admit("a", chain("new"))
    assert says.cases == [] and rig.coordinator.take_stats().decisions == {}


def test_the_last_decision_is_the_one_that_counts() -> None:
    says = Says(3)
    rig = served_once(says)
    rig.coordinator.take_stats()
    rig.ask("a", PROMPT)
    says.blocks = 0
    rig.ask("a", PROMPT)
    rig.admit("a", PROMPT)
    assert rig.coordinator.take_stats().decisions == {"recompute": 1}


def test_a_decision_to_load_counts_only_if_something_is_loaded_by_it() -> None:
    says = Says()
    rig = served_once(says)
    rig.coordinator.take_stats()
    assert rig.ask("a", PROMPT) == 8
    rig.admit("a", PROMPT)
    assert rig.coordinator.take_stats().decisions == {} and says.decisions == []
