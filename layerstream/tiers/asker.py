"""One background thread that asks a tier, so that nobody else ever waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from layerstream.tiers.breaker import Breaker
from layerstream.tiers.complaints import Complaints

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED = 256
"""Most calls that may go before a question when it comes; beyond, it fails at once."""
LONGEST_CALL_S = 5.0
"""Seconds after which a call hangs that has no deadline of its own."""


@dataclass(slots=True, kw_only=True)
class TierStats:
    """What the scheduler half asked of one tier, and how that went, since the tier was opened."""

    lookups: int = 0
    """Lookups that were wanted, those that failed at once included."""
    found_objects: int = 0
    """Objects that lookups found, those included that were found too late."""
    failures: int = 0
    """Calls that raised or answered nonsense, and failures that ranks reported."""
    late_answers: int = 0
    """Questions that were not answered by their deadline."""
    unasked: int = 0
    """Questions that failed at once: the tier was ill, or too much waited for it."""
    opened: int = 0
    """How often the breaker opened."""


class Answer(Generic[T]):
    """One question to a tier, as an `Asker` gives it out. For the thread that asked."""

    __slots__ = ("_asker", "_deadline", "_ended", "_result")

    def __init__(self, asker: Asker, deadline: float) -> None:
        self._asker, self._deadline = asker, deadline
        self._result: T | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether it is answered, failed, or past its deadline: then it is a miss for good."""
        return self._ended or self._asker._overdue(self)

    @property
    def result(self) -> T | None:
        """The answer; None if there is none yet, and for good if it failed or came late."""
        return self._result

    def cancel(self) -> None:
        """Nobody waits for it any more: what the tier may still answer is handed back to it. Idempotent.

        Does nothing to an answer that is there: what came with it is its owner's.
        """
        self._asker._end(self)


class _Call:
    """Something to do with the tier: a question if it has an answer, else something that the tier is told."""

    __slots__ = ("answer", "ask", "give_back", "longest_s", "what")

    def __init__(
        self,
        what: str,
        ask: Callable[[], Any],
        answer: Answer[Any] | None = None,
        give_back: Callable[[Any], None] | None = None,
        longest_s: float = LONGEST_CALL_S,
    ) -> None:
        self.what, self.ask, self.answer, self.give_back = what, ask, answer, give_back
        self.longest_s = longest_s


class Asker:
    """Makes calls of a tier in a thread of its own, watched by a breaker: in order, but for patient questions, whose
    turn comes when nothing else waits.

    A *question* fails at once while the breaker is not closed, and whatever is asked when it opens fails then. What the
    tier is *told* waits instead until it is well, since an ill tier may take its whole time limit for each; it is told
    once, even if the call raises: the tier may have heard.

    A call that takes longer than it may opens the breaker. Answers that are late though no call was, because too much
    waited for the tier or the machine is busy, are failures like others: three in a row open it.

    Args:
        name: of the tier, for the log.
        probe: raises while the tier is ill.
        clock: seconds, never going back.
        breaker: the tier's.
        stats: where `failures`, `late_answers`, `unasked` and `opened` are counted.
    """

    def __init__(
        self, name: str, probe: Callable[[], None], *, clock: Callable[[], float], breaker: Breaker, stats: TierStats
    ) -> None:
        self._name, self._probe, self._clock = name, probe, clock
        self._breaker, self._stats = breaker, stats
        self._complaints = Complaints(logger, clock=clock)
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._patient: deque[_Call] = deque()
        self._doing: _Call | None = None
        self._since = 0.0
        """When `_doing` began."""
        self._probing = self._closing = self._ended = False
        self._close: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=f"layerstream-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the tier may be asked. Starts the probe of an ill tier when one is due."""
        if self._breaker.closed:
            return True
        with self._changed:
            if not self._closing and self._breaker.probe_due():
                self._probing = True
                self._changed.notify()
        return False

    @property
    def well(self) -> bool:
        """Whether the tier may be asked, for who only wants to know: nothing is started."""
        return self._breaker.closed

    def ask(
        self,
        what: str,
        ask: Callable[[], T],
        *,
        deadline_s: float,
        give_back: Callable[[T], None] | None = None,
        patient: bool = False,
    ) -> Answer[T]:
        """Put a question.

        Args:
            what: name of the question, for the log.
            ask: puts it to the tier, and waits for what it says.
            deadline_s: seconds until it is too late for an answer.
            give_back: called in the thread with an answer that comes too late, or that nobody waits for any more.
            patient: let all others go first.
        """
        answer: Answer[T] = Answer(self, self._clock() + deadline_s)
        with self._changed:
            before = len(self._calls) + (len(self._patient) if patient else 0)
            if self._closing or not self._breaker.closed or before >= MAX_QUEUED:
                self._stats.unasked += 1
                answer._ended = True
            else:
                longest_s = deadline_s if deadline_s < float("inf") else LONGEST_CALL_S
                (self._patient if patient else self._calls).append(_Call(what, ask, answer, give_back, longest_s))
                self._changed.notify()
        return answer

    def tell(self, what: str, tell: Callable[[], None]) -> None:
        """Tell the tier something, once it is well. Always taken, unless the asker is closed: that is logged."""
        with self._changed:
            self._calls.append(_Call(what, tell))
            self._changed.notify()
            ended = self._ended
        if ended:
            self._drop_rest("it is closed")

    def fail(self, source: str, what: str, why: str, *, at_once: bool = False) -> None:
        """Something went wrong; `source` is who saw it (`Breaker.fail`)."""
        with self._changed:
            self._stats.failures += source != "answers"
            if opened := self._breaker.fail(source, at_once=at_once):
                self._stats.opened += 1
                self._give_up_questions()
        self._complaints.warn(
            "LayerStream: tier %s failed at %s: %s%s",
            self._name,
            what,
            why,
            "; it is left alone until it works again" if opened else "",
        )

    def succeed(self, source: str) -> None:
        """Something went well, as `source` saw it (`Breaker.succeed`)."""
        with self._changed:
            self._breaker.succeed(source)

    def close(self, timeout_s: float, close: Callable[[], None]) -> None:
        """Fail all questions, tell the tier what it has not been told, and call `close` in the thread. Idempotent.

        Args:
            timeout_s: most seconds for that. What then still waits is dropped and logged; a thread that hangs in the
                tier is left to the end of the process.
            close: lets go of the tier.
        """
        with self._changed:
            if not self._closing:
                self._closing, self._close = True, close
            self._give_up_questions()
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("LayerStream: tier %s has not let go within %.1f s", self._name, timeout_s)
            self._drop_rest("it takes too long")

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if call.answer is None or not call.answer.done:
                self._do(call)
        try:
            self._close()
        except BaseException as error:  # noqa: BLE001 - a tier may be anybody's code
            logger.warning("LayerStream: tier %s failed to close: %r", self._name, error)

    def _next(self) -> _Call | None:
        """Wait for something to do; None once all is done and the asker is closed."""
        with self._changed:
            while True:
                calls = self._calls or self._patient
                if calls and (self._closing or self._breaker.closed):
                    return calls.popleft()
                if self._closing:
                    self._ended = True
                    return None
                if self._probing:
                    self._probing = False
                    return _Call("probe", self._probe)
                self._changed.wait()

    def _do(self, call: _Call) -> None:
        with self._changed:
            self._doing, self._since = call, self._clock()
        try:
            self._make(call)
        finally:
            with self._changed:
                self._doing = None

    def _make(self, call: _Call) -> None:
        probes = call.ask is self._probe
        try:
            result = call.ask()
        except BaseException as error:  # noqa: BLE001 - a tier may be anybody's code, and the thread goes on
            if probes:
                with self._changed:
                    self._breaker.probed(well=False)
            self.fail("calls", call.what, repr(error))
            if call.answer is not None:
                self._end(call.answer)
            elif self._closing:
                self._drop_rest("it fails")
            return
        if probes:
            with self._changed:
                self._breaker.probed(well=True)
            logger.info("LayerStream: tier %s works again", self._name)
        self.succeed("calls")
        if call.answer is not None and not self._end(call.answer, result) and call.give_back is not None:
            call.give_back(result)

    def _overdue(self, answer: Answer[Any]) -> bool:
        """Whether an answer's deadline has passed: it is a miss then."""
        now = self._clock()
        if now < answer._deadline:
            return False
        with self._changed:
            if answer._ended:
                return True
            answer._ended = True
            self._stats.late_answers += 1
            doing, took = self._doing, now - self._since
        hangs = doing is not None and took >= doing.longest_s
        why = f"{doing.what} has taken {took:.2f} s" if doing is not None and hangs else "too much waits for the tier"
        self.fail("answers", "answering in time", why, at_once=hangs)
        return True

    def _end(self, answer: Answer[T], result: T | None = None) -> bool:
        """Set an answer's result; False if it is too late for that."""
        if self._overdue(answer):
            return False
        with self._changed:
            if answer._ended:
                return False
            answer._result = result
            answer._ended = True
            self._breaker.succeed("answers")
            return True

    def _give_up_questions(self) -> None:
        for call in (*self._calls, *self._patient):
            if call.answer is not None:
                call.answer._ended = True
        self._patient.clear()
        self._calls = deque(call for call in self._calls if call.answer is None)

    def _drop_rest(self, why: str) -> None:
        with self._changed:
            dropped = [call.what for call in self._calls]
            self._calls.clear()
        if dropped:
            logger.warning(
                "LayerStream: tier %s is not told to %s, and %d more: %s", self._name, dropped[0], len(dropped) - 1, why
            )
