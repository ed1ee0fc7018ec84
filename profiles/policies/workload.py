"""A made-up service: chats and agents that come back, and documents that never do.

    python -m profiles.policies.workload --requests 20000 --out mixed.jsonl

Sessions arrive at random (Poisson) and are of three kinds, by `SHARES`:

- a chat belongs to one of `APPS` applications, drawn by Zipf's law, and begins with its application's system prompt. It
  has a geometric number of turns with log-normal think times; each turn brings a question, and the answer before it.
- an agent begins with its application's tools and then works in a loop: every step repeats all that went before and
  adds what a tool said, seconds after the last step. Some runs stop for a person and go on minutes later.
- a document is one long prompt that no other request shares: a summary, a classification.

A trace has the form that `layerstream.request_trace` reads, with 512 tokens in a block. The same seed gives the same
trace.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
SHARES = {"chat": 0.60, "agent": 0.10, "document": 0.30}
"""Part of the sessions that are of each kind."""
APPS = 40
"""Applications, each with a system prompt of its own."""
SESSIONS_PER_S = 2.0


@dataclass(slots=True)
class Session:
    """A prompt that grows from request to request."""

    kind: str
    turns: int
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    """Ids of its full blocks."""


class Workload:
    """An endless stream of requests; the same one for the same seed.

    Args:
        seed: of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._next_id = 0
        self._apps = [self._fresh(self._draw.randint(1, 8)) for _ in range(APPS)]
        """Ids of the blocks of each application's system prompt."""
        self._tools = [self._fresh(self._draw.randint(8, 24)) for _ in range(APPS)]
        """Ids of the blocks of each application's agent: instructions and tools."""
        self._app_weights = [1 / (rank + 1) for rank in range(APPS)]

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests in order of time."""
        draw = self._draw
        due: list[tuple[float, int, Session]] = []
        arrival, number = 0.0, 0
        while True:
            if not due or arrival <= due[0][0]:
                number += 1
                heapq.heappush(due, (arrival, number, self._session()))
                arrival += draw.expovariate(SESSIONS_PER_S)
                continue
            now, order, session = heapq.heappop(due)
            request, pause = self._turn(session)
            yield {"timestamp": round(now * 1000), **request}
            if session.turns:
                heapq.heappush(due, (now + pause, order, session))

    def _fresh(self, blocks: int) -> list[int]:
        first, self._next_id = self._next_id, self._next_id + blocks
        return list(range(first, self._next_id))

    def _session(self) -> Session:
        draw = self._draw
        (kind,) = draw.choices(list(SHARES), weights=list(SHARES.values()))
        (app,) = draw.choices(range(APPS), weights=self._app_weights)
        if kind == "document":
            return Session(kind, turns=1)
        head = self._apps[app] if kind == "chat" else self._tools[app]
        # Geometric, with a mean of 3.3 turns or 12.5 steps.
        turns = 1
        while draw.random() < (0.70 if kind == "chat" else 0.92):
            turns += 1
        return Session(kind, turns=turns, tokens=len(head) * BLOCK_TOKENS, ids=list(head))

    def _turn(self, session: Session) -> tuple[dict[str, Any], float]:
        """The session's next request, and the seconds until the one after it."""
        draw = self._draw
        if session.kind == "chat":
            # A median question of 200 tokens, one in twenty with a file of thousands; a minute to read the answer, and
            # one time in five a quarter of an hour.
            asked = draw.lognormvariate(5.3, 1.0) if draw.random() < 0.95 else draw.lognormvariate(8.8, 0.8)
            answered = draw.lognormvariate(5.8, 0.7)
            pause = draw.lognormvariate(4.1, 1.0) if draw.random() < 0.8 else draw.lognormvariate(6.8, 1.0)
        elif session.kind == "agent":
            # What a tool said; one step in ten waits for a person.
            asked, answered = draw.lognormvariate(6.6, 1.0), draw.lognormvariate(5.0, 0.6)
            pause = draw.lognormvariate(2.0, 0.7) if draw.random() < 0.9 else draw.lognormvariate(5.5, 0.8)
        else:
            asked, answered, pause = draw.lognormvariate(9.6, 0.7), draw.lognormvariate(5.5, 0.6), 0.0
        session.turns -= 1
        session.tokens += max(1, round(min(asked, 120_000)))
        full, rest = divmod(session.tokens, BLOCK_TOKENS)
        session.ids += self._fresh(full - len(session.ids))
        tail = self._fresh(1) if rest else []
        output = max(1, round(answered))
        request: dict[str, Any] = {
            "input_length": session.tokens,
            "output_length": output,
            "hash_ids": session.ids + tail,
        }
        session.tokens += output
        return request, pause


def write(path: Path, *, requests: int, seed: int = 0) -> None:
    """Write a trace of so many requests.

    Raises:
        OSError: the file cannot be written.
    """
    source = Workload(seed).requests()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(requests):
            file.write(json.dumps(next(source)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000, help="requests to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    write(arguments.out, requests=arguments.requests, seed=arguments.seed)


if __name__ == "__main__":
    main()
