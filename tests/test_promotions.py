"""Requests that wait for tiers: who waits for what, how long, and what is kept for them."""

from __future__ import annotations

import random

import pytest

from layerstream.falls import FALLS_PER_S, LONGEST_HOLD_S
from layerstream.promotions import LEASE_S, LONGEST_WAIT_S, PREFIXES_AT_ONCE, TURN_S, Promotions
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
PROMPT = chain(range(2 * K))


def holding(rig: TieringRig, prompt: list[bytes] = PROMPT, tier: int = 0) -> None:
    for one in rig.objects(prompt):
        rig.tiers[tier].put(one, prompt)


def promotions(rig: TieringRig) -> Promotions:
    assert rig.coordinator.tiering is not None
    return rig.coordinator.tiering.promotions


def fell(rig: TieringRig) -> int:
    return promotions(rig).fell_requests


def push_out(rig: TieringRig, name: str = "push") -> None:
    """Another request wants the whole pool."""
    prompt = chain(f"{name}{block}" for block in range(rig.slots * K))
    rig.admit(name, prompt)
    rig.compute(name, prompt)
    rig.turn()
    rig.coordinator.finish(name)


# Who waits.


def test_a_request_waits_for_the_lookup_then_for_the_bytes_and_hits_then() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    assert rig.tier_jobs == []
    rig.tiers[0].answer()
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K


def test_what_tiers_lack_makes_nobody_wait() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1, tails=False))
    for name in "abc":
        assert rig.ask(name, chain(name * 9)) == 0
    assert fell(rig) == 0


def test_a_hit_that_cannot_grow_makes_nobody_wait_and_asks_nobody() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    rig.admit("x", PROMPT)
    rig.compute("x", PROMPT)
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K
    assert rig.ask("b", [*PROMPT, b"more"], local=2 * K + 1) == 0
    assert rig.ask("c", PROMPT[:1], tokens=5) == 0
    assert rig.tiers[0].count("find") == 0


def test_without_a_tier_that_is_well_nobody_waits_or_is_counted() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    rig.tiers[0].fall_ill()
    assert rig.ask("a", PROMPT) == 0
    assert rig.tiers[0].count("find") == 0 and fell(rig) == 0
    assert not promotions(rig)._requests


def test_asking_again_asks_the_tier_once() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    for _ in range(20):
        assert rig.ask("a", PROMPT) is None
        rig.turn()
    assert rig.tiers[0].count("find") == 1
    rig.tiers[0].answer()
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    for _ in range(20):
        assert rig.ask("a", PROMPT) == 2 * K
        rig.turn()
    assert rig.tiers[0].count("find") == 1


def test_a_miss_is_not_asked_about_again_while_the_request_waits_for_room() -> None:
    rig = TieringRig(FakeTier())
    for _ in range(20):
        assert rig.ask("a", PROMPT) == 0
        rig.turn()
    assert rig.tiers[0].count("find") == 2, "for whole objects, and for a shorter one"


def test_requests_with_one_prompt_share_a_lookup() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    names = [f"r{number}" for number in range(20)]
    for _ in range(3):
        for name in names:
            assert rig.ask(name, PROMPT) is None
        rig.turn()
    assert rig.tiers[0].count("find") == 1
    rig.tiers[0].answer()
    rig.turn()
    for name in names:
        assert rig.ask(name, PROMPT) == 2 * K
        rig.admit(name, PROMPT, external=2 * K)
    rig.turn()
    for name in names:
        rig.coordinator.finish(name)
    rig.check_idle()


def test_prompts_that_differ_in_what_is_never_loaded_share_a_lookup() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    for name, last in (("a", "x"), ("b", "y")):
        assert rig.ask(name, chain([*range(2 * K - 1), last]), tokens=2 * K * 16) is None
    assert rig.tiers[0].count("find") == 1


def test_one_of_those_who_share_may_leave() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    for name in "ab":
        assert rig.ask(name, PROMPT) is None
    rig.coordinator.finish("a")
    rig.tiers[0].answer()
    assert rig.ask("b", PROMPT) is None
    rig.turn()
    assert rig.ask("b", PROMPT) == 2 * K
    push_out(rig)
    assert rig.ask("b", PROMPT) == 2 * K, "it is kept for the other"
    rig.coordinator.finish("b")
    rig.settle()
    rig.check_idle()


def test_a_second_request_waits_for_what_comes_for_the_first_and_does_not_look_up() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    longer = [*PROMPT, *chain("more")]
    for _ in range(3):
        assert rig.ask("b", longer) is None
    assert rig.tiers[0].count("find") == 1
    rig.turn()
    assert rig.ask("b", longer) == 2 * K
    assert rig.tiers[0].count("find") == 3, "for what the first did not want"


def test_who_comes_first_waits_for_what_is_to_come_for_another_though_it_was_not_sent_yet() -> None:
    rig = TieringRig(FakeTier(), block_bytes=400 << 20)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    asked = rig.tiers[0].count("find")
    assert rig.ask("b", [*PROMPT, *chain("more")]) is None
    assert rig.tiers[0].count("find") == asked


def test_who_looked_up_the_same_at_once_waits_for_whoever_fetches_it() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    longer = [*PROMPT, *chain("more")]
    for hashes in (PROMPT, longer):
        assert rig.ask(str(len(hashes)), hashes) is None
    for _ in range(2):
        rig.tiers[0].answer()
        for hashes in (PROMPT, longer):
            assert rig.ask(str(len(hashes)), hashes) is None
    rig.plan()
    assert sum(len(job.objects) for job in rig.tier_jobs) == 2, "nothing is fetched twice"
    assert rig.ask(str(len(longer)), longer) is None
    rig.turn()
    for hashes in (PROMPT, longer):
        assert rig.ask(str(len(hashes)), hashes) == 2 * K


@pytest.mark.parametrize("how", ["it is lost", "it is late", "the first goes away"])
def test_a_failed_promotion_leaves_nobody_waiting(how: str) -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    longer = [*PROMPT, *chain("more")]
    assert rig.ask("b", longer) is None
    match how:
        case "it is lost":
            rig.tiers[0].lose(*rig.objects(PROMPT))
            rig.turn()
        case "it is late":
            rig.plan()
            rig.clock.now += 5.0
            rig.plan()
        case "the first goes away":
            rig.coordinator.finish("a")
            assert rig.ask("b", longer) is None, "it comes nevertheless"
            rig.turn()
    rig.clock.now += 3.0
    expected = 2 * K if how == "the first goes away" else 0
    assert rig.ask("b", longer) == expected
    if how != "the first goes away":
        rig.ask("a", PROMPT)
        rig.clock.now += 1.0
        assert rig.ask("a", PROMPT) == 0
        assert fell(rig) == 1 + (how == "it is late"), "the second found nothing, or no tier that was well"
    for name in "ab":
        rig.coordinator.finish(name)
    rig.settle()
    rig.check_idle()


def test_whoever_computed_it_meanwhile_ends_the_wait() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    assert rig.ask("a", PROMPT) is None
    rig.admit("x", PROMPT)
    rig.compute("x", PROMPT)
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K
    assert rig.ask("b", chain("zzzzz")) is None
    assert rig.ask("b", chain("zzzzz"), local=5) == 0


def test_what_the_engine_holds_itself_is_not_fetched() -> None:
    rig = TieringRig(FakeTier())
    holding(rig, PROMPT[:K])
    assert rig.ask("a", PROMPT, local=K) == 0
    assert rig.ask("b", PROMPT, local=K + 1) == 0
    rig.plan()
    assert rig.tier_jobs == [] and not rig.tiers[0].tickets


@pytest.mark.parametrize(("local", "fetched"), [(0, True), (K, True), (K + 1, False)])
def test_little_beyond_what_the_engine_holds_is_not_worth_all_that_lies_before(local: int, fetched: bool) -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert (rig.ask("a", PROMPT, local=local) is None) == fetched


# For how long.


def test_only_a_few_prefixes_are_looked_up_at_a_time_in_the_order_of_asking() -> None:
    rig = TieringRig(FakeTier(at_once=False), slots=64)
    prompts = {f"r{number}": chain([number] * 5) for number in range(3 * PREFIXES_AT_ONCE)}
    for hashes in prompts.values():
        holding(rig, hashes)
    served: list[str] = []
    for _ in range(40):
        for name, hashes in prompts.items():
            if name not in served and rig.ask(name, hashes) is not None:
                served.append(name)
        assert len(rig.tiers[0].asked) <= PREFIXES_AT_ONCE
        rig.turn()
        rig.tiers[0].answer()
    assert served == list(prompts)
    assert fell(rig) == 0


def test_who_waits_long_for_a_turn_gets_none() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    for number in range(PREFIXES_AT_ONCE):
        assert rig.ask(f"busy{number}", chain([number] * 5)) is None
    assert rig.ask("a", PROMPT) is None
    rig.turn(TURN_S - 0.1)
    assert rig.ask("a", PROMPT) is None
    rig.turn(0.1)
    assert rig.ask("a", PROMPT) == 0
    assert fell(rig) == 1


@pytest.mark.parametrize("what", ["lookup", "bytes", "turn", "others"])
def test_nobody_waits_longer_than_the_longest_wait(what: str) -> None:
    rig = TieringRig(FakeTier(at_once=what == "bytes"), slots=64, block_bytes=2 << 30)
    holding(rig)
    if what == "turn":
        for number in range(PREFIXES_AT_ONCE):
            rig.ask(f"busy{number}", chain([number] * 5))
    if what == "others":
        rig.tiers[0].at_once = True
        rig.ask("first", PROMPT)
    hashes = [*PROMPT, *chain("more")] if what == "others" else PROMPT
    steps = 0
    while rig.ask("a", hashes) is None:
        assert steps <= LONGEST_WAIT_S / 0.5 + 1, "it waits for ever"
        steps += 1
        rig.clock.now += 0.5
        rig.plan()
    assert rig.ask("a", hashes) == 0, "and does not wait again"
    assert not promotions(rig)._served or what in ("turn", "others")


def test_the_longest_wait_holds_for_those_who_do_not_ask_any_more() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    assert rig.ask("a", PROMPT) is None
    rig.turn(LONGEST_WAIT_S)
    assert not promotions(rig)._served
    rig.tiers[0].answer()
    assert not rig.tiers[0].tickets


def test_what_nobody_asks_about_any_more_goes_on() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.tiers[0].answer()
    for _ in range(3):
        rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K


# Falls.


def test_requests_that_wait_for_a_tier_that_fails_fall_one_after_another() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    names = [f"r{number}" for number in range(PREFIXES_AT_ONCE)]
    for name in names:
        assert rig.ask(name, chain(name)) is None
    rig.tiers[0].fall_ill()
    let_go: dict[str, float] = {}
    for step in range(100):
        for name in names:
            if name not in let_go and rig.ask(name, chain(name)) is not None:
                let_go[name] = step * 0.05
        rig.turn(0.05)
    assert fell(rig) == len(names)
    assert [let_go[name] for name in names] == [pytest.approx(place / FALLS_PER_S, abs=0.051) for place in range(8)]
    assert rig.ask("new", PROMPT) == 0, "who comes later does not wait at all"


def test_a_thousand_requests_on_a_dead_tier_fall_in_bounded_time_with_few_questions() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    prompts = {f"r{number}": chain([number] * 5) for number in range(1000)}
    waiting = dict(prompts)
    let_go: list[float] = []
    started = rig.clock.now
    for step in range(600):
        for name, hashes in [*waiting.items()]:
            if rig.ask(name, hashes) is not None:
                let_go.append(rig.clock.now - started)
                del waiting[name]
        if step == 5:
            rig.tiers[0].fall_ill()
        rig.turn(0.05)
        if not waiting:
            break
    assert not waiting and max(let_go) < 0.25 + LONGEST_HOLD_S + 0.3
    assert fell(rig) == 1000
    assert rig.tiers[0].count("find") == PREFIXES_AT_ONCE
    in_first_second = sum(0.25 <= when < 1.25 for when in let_go)
    assert in_first_second <= FALLS_PER_S + 2
    for name in prompts:
        rig.coordinator.finish(name)
    rig.check_idle()


def test_who_got_all_there_is_to_get_has_not_fallen() -> None:
    rig = TieringRig(FakeTier(0, at_once=False), FakeTier(1))
    holding(rig, tier=1)
    assert rig.ask("a", PROMPT) is None
    rig.tiers[0].fall_ill()
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K
    rig.turn()
    assert fell(rig) == 0


def test_all_who_share_a_lookup_fall_and_are_let_go_one_after_another() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    for name in "abc":
        assert rig.ask(name, PROMPT) is None
    rig.tiers[0].fall_ill()
    for let_go in ("a", "ab", "abc"):
        assert [name for name in "abc" if rig.ask(name, PROMPT) == 0] == list(let_go)
        rig.turn(1.0 / FALLS_PER_S)
    assert fell(rig) == 3


def test_who_is_gone_has_not_fallen() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    rig.coordinator.finish("a")
    rig.tiers[0].lose(*rig.objects(PROMPT))
    rig.turn()
    assert fell(rig) == 0
    rig.settle()


def test_a_late_job_fells_a_request_once() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    rig.clock.now += 5.0
    rig.plan()
    assert rig.ask("a", PROMPT) == 0
    (job,) = rig.tier_jobs
    rig.coordinator.report(rig.run_tier(job, 0))
    assert rig.ask("a", PROMPT) == 0 and fell(rig) == 1


def test_a_tier_with_an_overdue_job_is_left_alone_until_it_has_ended() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    holding(rig)
    other = chain("other one")
    holding(rig, other, tier=1)
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    rig.clock.now += 5.0
    rig.plan()
    asked = rig.tiers[0].count("find")
    assert rig.ask("b", other) is None, "another tier is asked"
    assert rig.tiers[0].count("find") == asked
    rig.turn()
    assert rig.ask("c", chain("third one")) == 0
    assert rig.tiers[0].count("find") == asked + 2


# What is kept.


def test_what_came_for_a_request_stays_until_it_is_admitted() -> None:
    rig = TieringRig(FakeTier(), slots=4)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    push_out(rig)
    assert rig.ask("a", PROMPT) == 2 * K
    rig.admit("a", PROMPT, external=2 * K)
    push_out(rig, "again")
    assert rig.ask("b", PROMPT) == 2 * K, "a load reads it"
    rig.turn()
    rig.coordinator.finish("a")
    rig.coordinator.finish("b")
    rig.settle()
    rig.check_idle()


def test_what_came_before_anybody_asks_again_stays_too() -> None:
    rig = TieringRig(FakeTier(), slots=4)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    rig.coordinator.tiering.depart()  # type: ignore[union-attr]
    push_out(rig)
    assert rig.ask("a", PROMPT) == 2 * K


def test_what_the_pool_has_stays_while_the_rest_waits_to_be_sent() -> None:
    rig = TieringRig(FakeTier(), slots=8, block_bytes=400 << 20)
    other = chain("busy tier")
    for hashes in (PROMPT, other):
        holding(rig, hashes)
    rig.admit("x", PROMPT[:K])
    rig.compute("x", PROMPT[:K])
    rig.turn()
    rig.coordinator.finish("x")
    assert rig.ask("busy", other) is None and rig.ask("a", PROMPT) is None
    rig.plan()
    (job,) = rig.tier_jobs
    assert job.objects[0] in rig.objects(other)
    rig.tier_jobs.clear()
    for name in ("push", "again"):
        push_out(rig, name)
    rig.coordinator.report(rig.run_tier(job, 0))
    for _ in range(9):
        found = rig.ask("a", PROMPT)
        rig.turn()
    assert found == 2 * K


@pytest.mark.parametrize("how", ["finish", "lease"])
def test_it_goes_when_the_request_does_or_its_lease_ends(how: str) -> None:
    rig = TieringRig(FakeTier(), slots=4)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K
    rig.turn()
    if how == "finish":
        rig.coordinator.finish("a")
    else:
        rig.turn(LEASE_S - 0.1)
        push_out(rig)
        assert rig.ask("a", PROMPT) == 2 * K
        rig.turn(0.1)
    push_out(rig, "again")
    assert rig.coordinator._index is not None and rig.coordinator._index.match(PROMPT, 8) == 0
    assert rig.ask("a", PROMPT) == (None if how == "finish" else 0)
    rig.coordinator.finish("a")
    rig.settle()
    rig.check_idle()


def test_who_comes_after_the_lease_looks_up_anew() -> None:
    rig = TieringRig(FakeTier(), slots=4)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K
    rig.turn()
    rig.turn(LEASE_S)
    push_out(rig)
    assert rig.ask("b", PROMPT) is None
    rig.turn()
    assert rig.ask("b", PROMPT) == rig.ask("a", PROMPT) == 2 * K


def test_a_plain_miss_pins_nothing() -> None:
    rig = TieringRig(FakeTier(), slots=4)
    rig.admit("x", PROMPT[:K])
    rig.compute("x", PROMPT[:K])
    rig.turn()
    rig.coordinator.finish("x")
    rig.settle()
    assert rig.ask("a", PROMPT) == K
    push_out(rig)
    assert rig.ask("a", PROMPT) == 0


@pytest.mark.parametrize("stage", ["lookup", "tail", "bytes", "settled"])
@pytest.mark.parametrize("end", ["abort", "admitted with nothing", "reset", "reset, then abort"])
def test_whatever_ends_the_wait_at_any_stage_leaves_nothing_behind(stage: str, end: str) -> None:
    rig = TieringRig(FakeTier(at_once=False), slots=8)
    hashes = chain(range(2 * K + 1))
    holding(rig, hashes)
    assert rig.ask("a", hashes) is None
    for _ in range(["lookup", "tail", "bytes"].index(stage) if stage != "settled" else 2):
        rig.tiers[0].answer()
        assert rig.ask("a", hashes) is None
    if stage == "bytes":
        rig.plan()
    if stage == "settled":
        rig.turn()
        assert rig.ask("a", hashes) == 2 * K + 1
    if "reset" in end:
        rig.coordinator.reset()
        assert rig.ask("a", hashes) == 0
    if "abort" in end:
        rig.coordinator.finish("a")
    else:
        rig.admit("a", hashes)
        rig.coordinator.finish("a")
    rig.check()
    rig.tiers[0].answer()
    rig.turn()
    if "reset" in end:
        assert rig.coordinator._index is not None and rig.coordinator._index.chunks == 0
    rig.check_idle()


def test_a_name_used_again_at_once_is_another_request() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    other = chain("another")
    holding(rig)
    holding(rig, other)
    assert rig.ask("a", PROMPT) is None
    rig.coordinator.finish("a")
    assert rig.ask("a", other) is None
    rig.tiers[0].answer()
    for _ in range(3):
        rig.turn()
        rig.tiers[0].answer()
        rig.ask("a", other)
    assert rig.ask("a", other) == len(other)
    rig.coordinator.finish("a")
    rig.check_idle()


def test_a_preempted_request_is_looked_up_anew() -> None:
    rig = TieringRig(FakeTier(writes=False), slots=4)
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    rig.admit("a", PROMPT, external=rig.ask("a", PROMPT) or 0)
    rig.turn()
    push_out(rig)
    assert rig.ask("a", PROMPT) is None
    rig.turn()
    assert rig.ask("a", PROMPT) == 2 * K


def test_after_a_reset_no_tier_is_asked() -> None:
    rig = TieringRig(FakeTier())
    holding(rig)
    assert rig.ask("a", PROMPT) is None
    rig.coordinator.reset()
    for name in "ab":
        assert rig.ask(name, PROMPT) == 0
    rig.plan()
    assert rig.tier_jobs == [], "what had not been sent is not sent"
    assert rig.tiers[0].count("find") == 1


def test_a_thousand_rounds_of_lookups_that_come_to_nothing_leave_no_pin() -> None:
    dice = random.Random(7)
    rig = TieringRig(FakeTier(0), FakeTier(1, at_once=False), slots=8)
    prompts = [chain([number, *range(dice.randint(1, 9))]) for number in range(12)]
    for prompt in prompts:
        holding(rig, prompt, tier=dice.randint(0, 1))
    for number in range(1000):
        name, prompt = f"r{number % 3}", dice.choice(prompts)
        for _ in range(dice.randint(1, 3)):
            rig.ask(name, prompt)
            if dice.random() < 0.7:
                rig.turn()
                rig.tiers[1].answer()
        match dice.choice(["load", "engine has it", "abort", "preempt", "reject"]):
            case "load":
                found = rig.ask(name, prompt)
                rig.admit(name, prompt, external=found or 0)
                rig.turn()
            case "engine has it":
                rig.ask(name, prompt, local=len(prompt) - 1)
                rig.admit(name, prompt, local=len(prompt) - 1)
            case "preempt":
                rig.admit(name, prompt, external=rig.ask(name, prompt) or 0)
                rig.ask(name, prompt)
            case "reject":
                rig.turn()
        rig.coordinator.finish(name)
        rig.check()
    rig.settle()
    rig.check_idle()
