"""Faults, and the threads that inject them for as long as a run lasts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.soak.checks import Tally


class BusyError(Exception):
    """A fault cannot be done at the moment."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, and after a while comes right."""

    name: str
    do: Callable[[random.Random], object]
    mend: Callable[[], object] = lambda: None


class Misfortune:
    """Injects the faults of one thing, one at a time, with peace in between. Each is drawn once before any comes again.

    Args:
        what: the thing's name.
        faults: to draw from.
        seed: of what is drawn.
        tally: counts them.
        lasts: shortest and longest time of a fault, in seconds.
        peace: shortest and longest time between two.
    """

    def __init__(
        self,
        what: str,
        faults: Sequence[Fault],
        *,
        seed: str,
        tally: Tally,
        lasts: tuple[float, float] = (0.5, 6.0),
        peace: tuple[float, float] = (2.0, 10.0),
    ) -> None:
        self._faults, self._draw, self._tally = tuple(faults), random.Random(f"{seed} {what}"), tally
        self._lasts, self._peace = lasts, peace
        self._stop = threading.Event()
        self._alone = threading.Lock()
        """Held while something is wrong, or must not be."""
        self._thread = threading.Thread(target=self._run, name=f"soak-{what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Mend what is wrong, and do no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """While this lasts, nothing is wrong. It begins once what is wrong has come right."""
        with self._alone:
            yield

    def _run(self) -> None:
        waiting: list[Fault] = []
        while not self._stop.wait(self._draw.uniform(*self._peace)):
            if not waiting:
                waiting = self._draw.sample(self._faults, len(self._faults))
            with self._alone:
                self._inject(waiting.pop())

    def _inject(self, fault: Fault) -> None:
        try:
            fault.do(self._draw)
            self._tally.count(self._tally.faults, fault.name)
            self._stop.wait(self._draw.uniform(*self._lasts))
        except BusyError:
            self._tally.count(self._tally.faults, f"{fault.name}: could not be done")
        except Exception as error:  # noqa: BLE001 - the run must not go on without its faults unseen
            self._tally.violation("the run itself", f"{fault.name} could not be done: {error!r}")
        finally:
            try:
                fault.mend()
            except Exception as error:  # noqa: BLE001 - nothing after it would be what it seems
                self._tally.violation("the run itself", f"{fault.name} could not be mended: {error!r}")
