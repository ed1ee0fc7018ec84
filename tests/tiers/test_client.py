from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.errors import TierError
from layerstream.jobs import TierObject
from layerstream.tiers.asker import MAX_QUEUED
from layerstream.tiers.base import Found, StoreSite, Usage
from layerstream.tiers.client import Answer, TierClient
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.tier_faults import Answers, Clock, Fails, FaultyTier, Hangs, Slow, wait_until, works
from tests.rigs.tier_items import Room, empty_item, fill, make_batch, make_chain, make_format, make_site

FORM = make_format()


class Rig:
    """A client of a tier that a test can break, on time that the test moves."""

    def __init__(self, tier: FaultyTier | None = None, **options: Any) -> None:
        self.clock = Clock()
        self.tier = FaultyTier() if tier is None else tier
        self.client = TierClient(
            self.tier.spec(), self.tier.open_index(make_site([FORM])), place=2, clock=self.clock, **options
        )
        wait_until(lambda: self.client.usage() is not None)

    @property
    def shelf(self) -> MemoryTier:
        return self.tier.inner

    def write(self, objects: list[TierObject]) -> None:
        room = Room(1 << 20)
        store = self.shelf.open_store(StoreSite(format=FORM, memory=(room.memory,)))
        assert store.write(make_batch([fill(FORM, empty_item(FORM, each, room)) for each in objects])) == len(objects)

    def answered(self, answer: Answer[Any]) -> Any:
        wait_until(lambda: answer.done)
        return answer.result

    def find(self, objects: list[TierObject]) -> Found | None:
        found: Found | None = self.answered(self.client.find(objects))
        return found

    def idle(self) -> None:
        """Wait until the tier has been told and asked everything."""
        asker = self.client._asker
        wait_until(lambda: not (asker._calls or asker._patient or asker._doing))

    def recover(self) -> None:
        """Have the breaker close again."""
        self.tier.index = works

        def healthy() -> bool:
            self.clock.advance(1.0)
            return self.client.healthy

        wait_until(healthy)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    if isinstance(rig.tier.index, Hangs):
        rig.tier.index.let_go()
    rig.tier.index = works
    rig.client.close(30)
    assert not rig.client._asker._thread.is_alive()


def test_it_says_what_its_tier_is() -> None:
    tier = MemoryTier(tails=False)
    client = TierClient(
        tier.spec(name="memory-2", write=False, admission="reused"), tier.open_index(make_site([FORM])), place=3
    )
    assert (client.name, client.place, client.tails, client.writes, client.admission) == (
        "memory-2", 3, False, False, "reused",
    )  # fmt: skip
    client.close(30)


def test_a_lookup_finds_what_is_there(rig: Rig) -> None:
    chain = make_chain(4)
    rig.write(chain[:3])
    found = rig.find(chain)
    assert found is not None and found.present == (True, True, True, False)
    rig.client.release(found.ticket)
    rig.idle()
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0
    assert rig.client.stats.found_objects == 3


def test_tails_are_asked_only_of_tiers_that_keep_them() -> None:
    chain, tail = make_chain(2), make_chain(2, tail=3)[-1]
    for keeps in (True, False):
        rig = Rig(FaultyTier(MemoryTier(tails=keeps)))
        rig.tier.tails = keeps  # type: ignore[misc]
        rig.client.tails = keeps
        rig.write([*chain, tail])
        found = rig.answered(rig.client.find(chain, [tail]))
        assert found.present == (True, True, keeps)
        rig.client.close(30)


def test_a_reservation_is_settled_once(rig: Rig) -> None:
    chain = make_chain(3)
    rig.write(chain[:1])
    assert rig.answered(rig.client.reserve(chain)) == (False, True, True)
    assert rig.shelf.owed == 2
    rig.client.settle(chain[1:], written=True)
    rig.idle()
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0


def test_a_hung_tier_keeps_nobody_waiting_and_costs_one_deadline(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("find")
    answer = rig.client.find(make_chain(2))
    assert hangs.reached.wait(30)
    done = [answer.done]
    for seconds in (0.24, 0.01):
        rig.clock.advance(seconds)
        done.append(answer.done)
    assert done == [False, False, True] and answer.result is None
    assert not rig.client.healthy
    second = rig.client.find(make_chain(2))
    assert second.done and second.result is None
    assert (rig.client.stats.late_answers, rig.client.stats.unasked, rig.client.stats.opened) == (1, 1, 1)


def test_lookups_go_before_what_no_request_waits_for(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("reserve")
    rig.client.reserve(make_chain(1))
    assert hangs.reached.wait(30)
    reservations = [rig.client.reserve(make_chain(1, prompt=prompt)) for prompt in range(3)]
    rig.client.remove(make_chain(1))
    answer = rig.client.find(make_chain(2))
    rig.tier.index = Hangs("reserve", "remove")
    hangs.let_go()
    assert rig.answered(answer) is not None
    assert not any(each.done for each in reservations)


def test_lookups_that_are_late_behind_others_are_misses_and_three_in_a_row_open_the_breaker(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("reserve")
    rig.client.reserve(make_chain(3))
    assert hangs.reached.wait(30)
    for prompt in range(3):
        assert rig.client.healthy
        late = rig.client.find(make_chain(2, prompt=prompt))
        rig.clock.advance(0.26)
        assert late.done and late.result is None
    assert not rig.client.healthy
    assert (rig.client.stats.late_answers, rig.client.stats.failures, rig.client.stats.opened) == (3, 0, 1)


def test_a_lookup_in_time_excuses_those_that_were_late(rig: Rig) -> None:
    for _ in range(4):
        hangs = rig.tier.index = Hangs("reserve")
        rig.client.reserve(make_chain(3))
        assert hangs.reached.wait(30)
        late = [rig.client.find(make_chain(2)) for _ in range(2)]
        rig.clock.advance(0.26)
        assert [each.done for each in late] == [True, True]
        rig.tier.index = works
        hangs.let_go()
        rig.idle()
        assert rig.find(make_chain(2)) is not None
    assert rig.client.healthy and rig.client.stats.late_answers == 8


def test_what_is_found_too_late_is_released_by_the_client(rig: Rig) -> None:
    rig.write(make_chain(2))
    hangs = rig.tier.index = Hangs("find")
    answer = rig.client.find(make_chain(2))
    assert hangs.reached.wait(30)
    rig.clock.advance(1)
    assert answer.done
    hangs.let_go()
    rig.recover()
    rig.idle()
    assert answer.result is None
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0 and rig.shelf.calls["release"] == 1


def test_nobody_has_to_look_for_an_answer_to_be_late(rig: Rig) -> None:
    rig.write(make_chain(2))
    rig.tier.index = Slow(rig.clock, 0.3, "find")
    answer = rig.client.find(make_chain(2))
    wait_until(lambda: not rig.client.healthy)
    assert answer.done and answer.result is None
    rig.recover()
    rig.idle()
    assert rig.shelf.owed == 0


def test_an_answer_in_time_stays_good_however_late_it_is_looked_at(rig: Rig) -> None:
    rig.write(make_chain(2))
    answer = rig.client.find(make_chain(2))
    wait_until(lambda: answer._ended)
    rig.clock.advance(100)
    assert answer.done and answer.result is not None and answer.result.present == (True, True)
    assert rig.client.healthy


def test_what_is_reserved_too_late_is_settled_as_not_written(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("reserve")
    answer = rig.client.reserve(make_chain(3))
    assert hangs.reached.wait(30)
    done = []
    for seconds in (1, 4):
        rig.clock.advance(seconds)
        done.append(answer.done)
    assert done == [False, True] and answer.result is None
    hangs.let_go()
    rig.recover()
    rig.idle()
    assert rig.shelf.owed == 0 and rig.shelf.calls["settle"] == 1


@pytest.mark.parametrize("question", ["find", "reserve"])
def test_a_cancelled_question_leaves_nothing_behind(rig: Rig, question: str) -> None:
    rig.write(make_chain(2))
    hangs = rig.tier.index = Hangs(question)
    asked = make_chain(2) if question == "find" else make_chain(2, prompt="new")
    answer: Answer[Any] = getattr(rig.client, question)(asked)
    assert hangs.reached.wait(30)
    answer.cancel()
    answer.cancel()
    hangs.let_go()
    rig.idle()
    assert answer.done and answer.result is None
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0
    assert rig.client.healthy and rig.client.stats.late_answers == 0


def test_cancelling_an_answer_that_is_there_changes_nothing(rig: Rig) -> None:
    rig.write(make_chain(2))
    answer = rig.client.find(make_chain(2))
    rig.answered(answer)
    answer.cancel()
    assert answer.result is not None and rig.shelf.owed == 1
    rig.client.release(answer.result.ticket)
    rig.idle()
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0


def test_questions_that_nobody_waits_for_are_not_asked(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("probe", "find")
    rig.client.find([])
    assert hangs.reached.wait(30)
    answers = [rig.client.find(make_chain(1, prompt=prompt)) for prompt in range(5)]
    for answer in answers:
        answer.cancel()
    before = rig.shelf.calls["find"]
    hangs.let_go()
    rig.tier.index = works
    rig.find(make_chain(1))
    assert rig.shelf.calls["find"] == before + 2


@pytest.mark.parametrize(
    "error", [TierError("injected"), OSError(5, "I/O error"), ValueError("anything"), SystemExit(3), MemoryError()]
)
def test_whatever_a_tier_raises_is_a_miss(rig: Rig, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    rig.tier.index = Fails(error=error)
    assert rig.find(make_chain(1)) is None
    assert rig.answered(rig.client.reserve(make_chain(1))) is None
    assert rig.client.stats.failures == 2 and rig.client.healthy
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "faulty" in lines[0] and "find" in lines[0] and repr(error) in lines[0]
    rig.tier.index = works
    assert rig.find([]) is not None


def test_three_failures_open_the_breaker_and_a_probe_closes_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig.tier.index = Fails()
    for _ in range(3):
        assert rig.find(make_chain(1)) is None
    assert not rig.client.healthy
    calls = rig.shelf.calls["find"]
    assert rig.find(make_chain(1)) is None and rig.shelf.calls["find"] == calls
    rig.clock.advance(1)
    assert not rig.client.healthy
    wait_until(lambda: rig.client._asker._breaker.state == "open")
    rig.tier.index = works
    rig.clock.advance(1.5)
    assert not rig.client.healthy
    rig.clock.advance(0.5)
    assert not rig.client.healthy
    wait_until(lambda: rig.client.healthy)
    assert rig.find(make_chain(1)) is not None
    assert rig.client.stats.opened == 1 and rig.client.stats.failures == 4
    assert any("works again" in record.getMessage() for record in caplog.records)


def test_questions_under_way_when_the_breaker_opens_fail_at_once(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("find")
    late = rig.client.find(make_chain(1))
    assert hangs.reached.wait(30)
    behind = [rig.client.reserve(make_chain(1)) for _ in range(5)]
    assert not any(answer.done for answer in behind)
    rig.clock.advance(0.25)
    assert late.done
    assert all(answer.done and answer.result is None for answer in behind)
    hangs.let_go()
    rig.recover()
    assert rig.shelf.calls["reserve"] == 0


def test_a_hung_tier_collects_a_bounded_number_of_questions(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("find")
    first = rig.client.find([])
    assert hangs.reached.wait(30)
    answers = [rig.client.find([]) for _ in range(3 * MAX_QUEUED)]
    assert sum(answer.done for answer in answers) == 2 * MAX_QUEUED
    assert all(answer.result is None for answer in answers if answer.done)
    rig.client.remove(make_chain(1))
    assert len(rig.client._asker._calls) == MAX_QUEUED
    hangs.let_go()
    wait_until(lambda: first.done and all(answer.done for answer in answers))
    assert rig.client.stats.unasked == 2 * MAX_QUEUED + 1


def test_however_much_waits_that_nobody_waits_for_lookups_are_asked(rig: Rig) -> None:
    rig.write(make_chain(1))
    hangs = rig.tier.index = Hangs("reserve")
    rig.client.reserve(make_chain(1, prompt="new"))
    assert hangs.reached.wait(30)
    for _ in range(2 * MAX_QUEUED):
        rig.client.remove(make_chain(1, prompt="old"))
    answer = rig.client.find(make_chain(1))
    hangs.let_go()
    found = rig.answered(answer)
    assert found is not None and found.present == (True,)
    rig.client.release(found.ticket)


def test_an_ill_tier_is_told_later_what_it_is_owed(rig: Rig) -> None:
    rig.write(make_chain(2))
    found = rig.find(make_chain(2))
    new = make_chain(2, prompt="new")
    assert found is not None and rig.answered(rig.client.reserve(new)) == (True, True)
    for _ in range(3):
        rig.client.failed("a rank says so")
    assert not rig.client.healthy
    rig.client.release(found.ticket)
    rig.client.settle(new, written=False)
    rig.client.remove(new)
    rig.tier.index = Fails(only=["probe"])
    rig.clock.advance(1)
    assert not rig.client.healthy
    wait_until(lambda: rig.client._asker._breaker.state == "open")
    assert rig.shelf.owed == 3, "it is ill, and asked for nothing but a sign of life"
    rig.recover()
    rig.idle()
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0
    assert rig.shelf.calls["remove"] == 0


def test_lookups_without_a_ticket_need_no_release(rig: Rig) -> None:
    found = rig.find(make_chain(1))
    assert found is not None and found.ticket == ""
    rig.client.release(found.ticket)
    rig.idle()
    assert rig.shelf.calls["release"] == 0


def test_a_tier_that_fails_to_take_what_it_is_told_is_not_told_twice(rig: Rig) -> None:
    rig.write(make_chain(2))
    found = rig.find(make_chain(2))
    assert found is not None
    rig.tier.index = Fails(only=["release"], heard=True)
    rig.client.release(found.ticket)
    rig.idle()
    assert rig.shelf.calls["release"] == 1 and rig.shelf.owed == 0
    assert rig.client.stats.failures == 1


def test_ranks_that_fail_open_the_breaker_though_lookups_work(rig: Rig) -> None:
    for number in range(3):
        assert rig.client.healthy
        assert rig.find(make_chain(1)) is not None
        rig.client.failed(f"rank 0 could not read ({number})")
    assert not rig.client.healthy and rig.client.stats.failures == 3


def test_ranks_that_move_bytes_again_excuse_their_failures(rig: Rig) -> None:
    for _ in range(5):
        rig.client.failed("now and then")
        rig.client.failed("now and then")
        rig.client.worked()
    assert rig.client.healthy


NONSENSE: dict[str, Callable[[Any], Any]] = {
    "one too few": lambda found: dataclasses.replace(found, present=found.present[:-1]),
    "one too many": lambda found: dataclasses.replace(found, present=(*found.present, True)),
    "error codes": lambda found: dataclasses.replace(found, present=(True, -900)),
    "no answers": lambda found: dataclasses.replace(found, present=None),
    "no ticket": lambda found: dataclasses.replace(found, ticket=None),
    "None": lambda found: None,
    "a bare tuple": lambda found: found.present,
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_lookup_that_answers_nonsense_is_a_failure(rig: Rig, nonsense: str) -> None:
    rig.write(make_chain(2))
    rig.tier.index = Answers(NONSENSE[nonsense], "find")
    assert rig.find(make_chain(2)) is None
    assert rig.client.stats.failures == 1 and rig.client.stats.found_objects == 0


@pytest.mark.parametrize("nonsense", ["one too few", "one too many", "error codes", "no answers"])
def test_a_ticket_that_comes_with_nonsense_is_released(rig: Rig, nonsense: str) -> None:
    rig.write(make_chain(2))
    rig.tier.index = Answers(NONSENSE[nonsense], "find")
    assert rig.find(make_chain(2)) is None
    rig.tier.index = works
    rig.idle()
    assert rig.shelf.owed == 0


@pytest.mark.parametrize("answer", [None, (), (True,), (True,) * 3, (1, 1), "yes"])
def test_a_reservation_that_answers_nonsense_is_a_failure_and_settled(rig: Rig, answer: object) -> None:
    rig.tier.index = Answers(lambda _: answer, "reserve")
    assert rig.answered(rig.client.reserve(make_chain(2))) is None
    rig.tier.index = works
    rig.idle()
    assert rig.shelf.owed == 0 and rig.client.stats.failures == 1


def test_usage_is_the_last_known_and_asked_again_every_few_seconds(rig: Rig) -> None:
    wait_until(lambda: rig.client.usage() is not None)
    assert rig.client.usage() == Usage(used_bytes=0, capacity_bytes=None, objects=0)
    rig.write(make_chain(3))
    for _ in range(20):
        assert rig.client.usage() == Usage(used_bytes=0, capacity_bytes=None, objects=0)
    rig.idle()
    assert rig.shelf.calls["usage"] == 1
    rig.clock.advance(5)
    rig.client.usage()
    rig.idle()
    usage = rig.client.usage()
    assert usage is not None and usage.objects == 3 and rig.shelf.calls["usage"] == 2


def test_usage_that_is_none_at_all_counts_as_a_failure(rig: Rig) -> None:
    rig.idle()
    rig.tier.index = Answers(lambda _: {"used": 3}, "usage")
    rig.clock.advance(5)
    rig.client.usage()
    rig.idle()
    assert rig.client.stats.failures == 1 and rig.client.usage() == Usage(used_bytes=0, capacity_bytes=None, objects=0)


def test_a_healthy_client_that_is_asked_for_its_health_asks_the_tier_nothing(rig: Rig) -> None:
    rig.idle()
    calls = rig.shelf.calls.total()
    assert all(rig.client.healthy for _ in range(100))
    assert rig.shelf.calls.total() == calls


def test_closing_tells_first_what_is_owed(rig: Rig) -> None:
    chains = [make_chain(2, prompt=prompt) for prompt in range(30)]
    for chain in chains:
        assert rig.answered(rig.client.reserve(chain)) == (True, True)
    for chain in chains:
        rig.client.settle(chain, written=False)
    rig.client.close(30)
    assert rig.shelf.owed == 0 and rig.shelf.closed["index"] == 1
    rig.client.close(30)
    assert rig.shelf.closed["index"] == 1
    assert rig.client.find(chains[0]).done and rig.client.reserve(chains[0]).result is None
    assert not rig.client._asker._thread.is_alive()


def test_closing_fails_what_is_asked(rig: Rig) -> None:
    hangs = rig.tier.index = Hangs("find")
    rig.client.find([])
    assert hangs.reached.wait(30)
    waiting = rig.client.reserve(make_chain(2))
    closing = threading.Thread(target=rig.client.close, args=(30,))
    closing.start()
    wait_until(lambda: waiting.done)
    hangs.let_go()
    closing.join(30)
    assert waiting.result is None and rig.shelf.calls["reserve"] == 0 and rig.shelf.closed["index"] == 1


def test_a_hung_tier_does_not_keep_the_client_from_closing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    hangs = rig.tier.index = Hangs("find")
    rig.client.find([])
    assert hangs.reached.wait(30)
    rig.client.settle(make_chain(1), written=False)
    rig.client.close(0.05)
    text = caplog.text
    assert "has not let go" in text and "not told to settle" in text
    assert rig.client._asker._thread.daemon


def test_a_tier_that_fails_while_it_is_closed_is_told_no_more(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    fails = rig.tier.index = Fails()
    for _ in range(3):
        rig.client.failed("dead")
    for number in range(5):
        rig.client.settle(make_chain(1, prompt=number), written=False)
    fails.calls = 0
    rig.client.close(30)
    assert fails.calls == 2
    assert "not told to settle, and 3 more" in caplog.text and "failed to close" in caplog.text


def test_what_is_told_after_closing_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.client.close(30)
    rig.client.settle(make_chain(1), written=False)
    assert "not told to settle" in caplog.text


def test_a_closed_client_lets_go_of_its_tier() -> None:
    rig = Rig()
    index = weakref.ref(rig.client._index)
    rig.client.close(30)
    del rig
    gc.collect()
    assert index() is None


class User:
    """Asks, and hands back what it got, as promotions and demotions do."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.finds: list[Answer[Found]] = []
        self.reserves: list[tuple[list[TierObject], Answer[tuple[bool, ...]]]] = []
        self.prompts = 0

    def find(self) -> None:
        self.finds.append(self.rig.client.find(make_chain(3)))

    def reserve(self) -> None:
        self.prompts += 1
        chain = make_chain(2, prompt=self.prompts)
        self.reserves.append((chain, self.rig.client.reserve(chain)))

    def cancel(self) -> None:
        if self.finds and not self.finds[-1].done:
            self.finds.pop().cancel()

    def hand_back(self) -> None:
        if self.finds and self.finds[0].done and (found := self.finds.pop(0).result) is not None:
            assert found.present == (True, True, True)
            self.rig.client.release(found.ticket)
        if self.reserves and self.reserves[0][1].done:
            chain, answer = self.reserves.pop(0)
            if answer.result is not None:
                assert answer.result == (True, True)
                self.rig.client.settle(chain, written=True)

    def hand_all_back(self) -> None:
        def none_left() -> bool:
            self.hand_back()
            return not self.finds and not self.reserves

        wait_until(none_left)


QUESTIONS = ("find", "reserve", "probe", "usage", "remove")
FAULTS: dict[str, Callable[[Clock], Any]] = {
    "fails": lambda clock: Fails(only=QUESTIONS),
    "fails each third time": lambda clock: Fails(lambda number: number % 3 == 0, only=QUESTIONS),
    "fails after a while": lambda clock: Fails(lambda number: number > 4, only=QUESTIONS),
    "slow": lambda clock: Slow(clock, 0.3),
    "answers None": lambda clock: Answers(lambda _: None, "reserve"),
    "answers too little": lambda clock: Answers(lambda answer: answer[:1], "reserve"),
    "hangs": lambda clock: Hangs(*QUESTIONS),
}
STEPS = ("find", "reserve", "cancel", "hand back", "wait", "break", "mend", "ranks fail", "ask for health")


@settings(max_examples=60)
@given(st.lists(st.sampled_from(STEPS), min_size=5, max_size=40), st.sampled_from(list(FAULTS)))
def test_whatever_goes_wrong_the_tier_gets_back_what_it_gave(history: list[str], kind: str) -> None:
    rig = Rig()
    user = User(rig)
    fault = FAULTS[kind](rig.clock)
    rig.write(make_chain(3))
    do: dict[str, Callable[[], object]] = {
        "find": user.find,
        "reserve": user.reserve,
        "cancel": user.cancel,
        "hand back": user.hand_back,
        "wait": lambda: rig.clock.advance(0.1),
        "break": lambda: setattr(rig.tier, "index", fault),
        "mend": lambda: setattr(rig.tier, "index", works),
        "ranks fail": lambda: rig.client.failed("injected"),
        "ask for health": lambda: rig.client.healthy,
    }
    for step in history:
        do[step]()
    if isinstance(fault, Hangs):
        fault.let_go()
    rig.recover()
    user.hand_all_back()
    rig.recover()
    rig.client.close(30)
    assert not rig.client._asker._thread.is_alive()
    assert rig.shelf.owed == 0 and rig.shelf.overpaid == 0
