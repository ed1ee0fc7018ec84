"""One run: clients, engines that live and die, misfortune, and what is looked at meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profiles.soak.checks import Tally
from profiles.soak.engine import Ask, EngineEndedError, Reply
from profiles.soak.faults import Misfortune
from profiles.soak.traffic import Client, Corpus
from profiles.soak.watch import Watch

HUNG_S = 120.0
"""Seconds without an answer after which a request, and with it the engine, counts as hung."""
LEFT_OVER_S = 20.0
"""Seconds in which an engine that has started removes what one before it left unfinished."""


class Engine(Protocol):
    """What a run needs of an engine (`profiles.soak.engine.EngineLife`)."""

    pid: int

    @property
    def ended(self) -> bool: ...
    def wait_ready(self) -> None: ...
    def ask(self, ask: Ask) -> Future[Reply]: ...
    def close(self) -> float: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run goes."""

    seconds: float
    seed: int
    clients: int = 4
    life_s: tuple[float, float] = (35.0, 110.0)
    """Shortest and longest life of an engine."""
    ends: tuple[str, ...] = ("killed", "killed", "stopped")
    """How engines end, in any order, before they end like that again."""
    pause_s: tuple[float, float] = (0.0, 0.4)
    """Shortest and longest time between two requests of a client."""


class Soak:
    """See the module.

    Args:
        plan: how it goes.
        corpus: what is asked.
        start: starts an engine with its tiers in the given order.
        tiers: their names.
        misfortunes: of the tiers.
        spared: the one among them that engines are spared while they start: none starts on a folder that it cannot
            write to, and says so.
        unfinished: the disk tier's unfinished files.
        tally: gets everything.
        watch: looks at the engine.
        said: told how it goes, once an engine ends.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        corpus: Corpus,
        start: Callable[[Sequence[str]], Engine],
        tiers: Sequence[str],
        misfortunes: Sequence[Misfortune],
        spared: Misfortune | None,
        unfinished: Callable[[], list[Path]],
        tally: Tally,
        watch: Watch,
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._plan, self._corpus, self._start, self._tiers = plan, corpus, start, tuple(tiers)
        self._misfortunes, self._spared, self._unfinished = misfortunes, spared, unfinished
        self._tally, self._watch, self._said = tally, watch, said
        self._draw = random.Random(f"{plan.seed} engines")
        self._ends: list[str] = []
        self._engine: Engine | None = None
        self._expected_end = threading.Event()
        """Set while the engine's end is our doing."""
        self._pause = threading.Event()
        """Set while nothing may be asked."""
        self._done = threading.Event()
        self._asking = [threading.Event() for _ in range(plan.clients)]
        """Set while a client waits for an answer."""

    def run(self) -> None:
        """All of it."""
        stop_at = time.monotonic() + self._plan.seconds
        clients = [
            threading.Thread(target=self._ask, args=(number,), name=f"soak-client-{number}", daemon=True)
            for number in range(self._plan.clients)
        ]
        self._pause.set()
        for thread in clients:
            thread.start()
        for misfortune in self._misfortunes:
            misfortune.start()
        try:
            self._live(stop_at)
            while time.monotonic() < stop_at and not self._hopeless:
                self._live(stop_at)
        finally:
            for misfortune in self._misfortunes:
                misfortune.stop()
            self._done.set()
            for thread in clients:
                thread.join(HUNG_S)

    @property
    def _hopeless(self) -> bool:
        """Whether going on would show nothing more."""
        return sum(self._tally.broken.values()) > 1000 or self._tally.broken["engine ended"] > 3

    def _live(self, stop_at: float) -> None:
        """One engine from its start to its end."""
        draw, tally = self._draw, self._tally
        order = draw.sample(self._tiers, len(self._tiers))
        left_over = {path.name for path in self._unfinished()}
        tally.count(tally.requests, "unfinished files left by dead engines", len(left_over))
        life_s = draw.uniform(*self._plan.life_s)
        if not self._ends:
            self._ends = draw.sample(self._plan.ends, len(self._plan.ends))
        end = self._ends.pop()
        begun = time.monotonic()
        with self._spared.spared() if self._spared is not None else nullcontext():
            engine = self._start(order)
            try:
                engine.wait_ready()
            except EngineEndedError as error:
                tally.violation("engine ended", str(error))
                return
        ready = time.monotonic()
        self._expected_end.clear()
        self._engine = engine
        self._watch.begin(engine.pid)
        self._pause.clear()
        until = min(ready + life_s, max(stop_at, ready + self._plan.life_s[0]))
        while time.monotonic() < until and not engine.ended:
            time.sleep(0.05)
            if left_over and time.monotonic() - ready > LEFT_OVER_S:
                if still := left_over & {path.name for path in self._unfinished()}:
                    tally.violation("left over", f"unfinished files of dead engines stay: {sorted(still)}")
                left_over = set()
        if engine.ended:
            tally.violation("engine ended", "nobody ended it")
        self._watch.end()
        if end == "killed":
            self._kill(engine)
        else:
            self._stop(engine)
        self._said(
            f"{ready - begun:.0f} s to start, {time.monotonic() - ready:.0f} s served from {', '.join(order)}; {end}"
        )

    def _kill(self, engine: Engine) -> None:
        self._expected_end.set()
        self._pause.set()
        engine.kill()
        self._tally.count(self._tally.faults, "engine: killed")
        # vLLM's own: whoever is killed cannot remove it.
        for path in self._watch.shared_memory():
            path.unlink(missing_ok=True)

    def _stop(self, engine: Engine) -> None:
        """Once nobody waits for an answer; what is written behind is still under way."""
        self._pause.set()
        deadline = time.monotonic() + HUNG_S
        while any(asking.is_set() for asking in self._asking) and time.monotonic() < deadline and not engine.ended:
            time.sleep(0.01)
        self._expected_end.set()
        try:
            seconds = engine.close()
        except TimeoutError as error:
            self._tally.violation("shutdown", str(error))
        else:
            notes = self._tally.notes
            notes["longest shutdown, s"] = round(max(notes.get("longest shutdown, s", 0.0), seconds), 1)
        self._tally.count(self._tally.faults, "engine: stopped")
        if left := self._watch.shared_memory():
            self._tally.violation("left over", f"an engine that was stopped left {', '.join(map(str, left))}")

    def _ask(self, number: int) -> None:
        client, draw = Client(f"{self._plan.seed} client {number}", self._corpus), random.Random(number)
        asking = self._asking[number]
        while not self._done.wait(draw.uniform(*self._plan.pause_s)):
            asking.set()
            engine = self._engine
            if self._pause.is_set() or engine is None:
                asking.clear()
                self._done.wait(0.05)
                continue
            turn, ask = client.next()
            try:
                reply = engine.ask(ask).result(HUNG_S)
            except EngineEndedError:
                if self._expected_end.is_set():
                    self._tally.count(self._tally.requests, "lost with a killed engine")
                else:
                    self._done.wait(1.0)
            except TimeoutError:
                self._tally.violation("hang", f"no answer for {HUNG_S:g} s")
            else:
                self._tally.answered(turn.reference, reply, len(turn.prompt))
            asking.clear()
