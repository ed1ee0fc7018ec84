"""Copies of a real engine's worker that are held, or come late, and the memory its processes take."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.rigs.serving_engine import SETTLE_S, ServingEngine


class Gate:
    """Holds the copies of some of a worker's streams until it is opened. A context manager."""

    def __init__(self, engine: ServingEngine, file: Path, *streams: str) -> None:
        self._engine, self._file, self._streams = engine, file, list(streams)
        self._reached = file.with_suffix(".reached")

    def __enter__(self) -> Self:
        self._file.touch()
        self._engine.in_worker(_late_copies, self._streams, str(self._file), str(self._reached), 0.0, 0)
        return self

    def await_copy(self) -> None:
        """Wait until a copy is held."""
        deadline = time.monotonic() + SETTLE_S
        while not self._reached.exists():
            assert time.monotonic() < deadline, f"no copy of {self._streams} was made"
            time.sleep(0.005)

    def open(self) -> None:
        self._file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.open()
        if not self._engine.closed:
            self._engine.in_worker(_prompt_copies)


def delay_copies(engine: ServingEngine, *, most_s: float, seed: int) -> None:
    """From here on each copy is late by a random time."""
    engine.in_worker(_late_copies, [], "", "", most_s, seed)


def _late_copies(_: Any, streams: list[str], gate: str, reached: str, most_s: float, seed: int) -> None:
    import importlib
    import pathlib
    import random
    import time

    cpu_streams: Any = importlib.import_module("layerstream.streams.cpu_streams")
    attempt = getattr(cpu_streams, "prompt_attempt", cpu_streams._attempt)
    cpu_streams.prompt_attempt = attempt
    dice = random.Random(seed)

    def late(stream: str, work: Any, args: Any, kwargs: Any) -> Any:
        if work is not cpu_streams._pass and (not streams or stream in streams):
            if gate:
                pathlib.Path(reached).touch()
                while pathlib.Path(gate).exists():
                    time.sleep(0.002)
            time.sleep(dice.uniform(0, most_s))
        return attempt(stream, work, args, kwargs)

    cpu_streams._attempt = late


def _prompt_copies(_: Any) -> None:
    import importlib

    cpu_streams: Any = importlib.import_module("layerstream.streams.cpu_streams")
    cpu_streams._attempt = cpu_streams.prompt_attempt


def resident_mib(processes: Sequence[int]) -> float:
    """Memory of its own that these processes have in RAM."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
