"""Ranks that tell each other values: as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

LATEST_S = 60.0


class Meeting:
    """What every rank tells, all ranks hear."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._told: list[Any] = [None] * ranks

    def exchange(self, rank: int) -> Callable[[Any], list[Any]]:
        """A rank's end."""

        def exchange(value: Any) -> list[Any]:
            self._told[rank] = value
            self._barrier.wait(LATEST_S)
            everyone = list(self._told)
            self._barrier.wait(LATEST_S)
            return everyone

        return exchange


def all_at_once(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do what each rank does, in threads that exchange values as vLLM's ranks do; their results.

    Raises:
        BaseException: what one of them raised.
    """
    meeting = Meeting(len(acts))
    local = threading.local()

    def exchange(value: Any) -> list[Any]:
        everyone: list[Any] = local.exchange(value)
        return everyone

    def run(rank: int) -> Any:
        local.exchange = meeting.exchange(rank)
        return acts[rank]()

    with (
        mock.patch("layerstream.hooks.vllm.compat._exchange", exchange),
        ThreadPoolExecutor(len(acts)) as threads,
    ):
        return list(threads.map(run, range(len(acts))))
