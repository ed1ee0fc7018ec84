"""What is asked: conversations that grow turn by turn, many of them from a common beginning, under several salts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from profiles.soak.engine import Ask, Reply

ANSWER_TOKENS = 8
TOKEN_IDS = range(10, 500)
"""Of the tiny model."""
SALTS: tuple[str | None, ...] = (None, "red", "blue")
ABORTED = 0.04
"""Part of the requests that are aborted."""
GOES_ON = 0.6
"""Part of the requests that are the next turn of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much there is to ask."""

    beginnings: int = 3
    beginning_tokens: tuple[int, int] = (100, 420)
    conversations: int = 24
    turns: int = 4
    turn_tokens: tuple[int, int] = (20, 260)


@dataclass(slots=True, kw_only=True)
class Turn:
    """A prompt, and the answer of an engine without the connector."""

    prompt: list[int]
    reference: Reply


@dataclass(slots=True)
class Corpus:
    """All that may be asked."""

    conversations: list[list[Turn]] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return [turn for conversation in self.conversations for turn in conversation]


def make_corpus(seed: int, shape: Shape, ask: Callable[[Ask], Future[Reply]]) -> Corpus:
    """Draw conversations, in which each turn goes on from the answer to the one before.

    Args:
        seed: of what is drawn.
        shape: how much.
        ask: the engine without the connector.

    Raises:
        RuntimeError: it failed a request.
    """
    draw = random.Random(seed)
    beginnings = [_tokens(draw, shape.beginning_tokens) for _ in range(shape.beginnings)]
    prompts = [
        beginnings[number % len(beginnings)] + _tokens(draw, shape.turn_tokens) for number in range(shape.conversations)
    ]
    corpus = Corpus([[] for _ in prompts])
    for _ in range(shape.turns):
        futures = [ask(Ask(prompt=prompt, tokens=ANSWER_TOKENS)) for prompt in prompts]
        for number, future in enumerate(futures):
            reply = future.result()
            if reply.failed:
                raise RuntimeError(f"the engine without the connector failed a request: {reply.failed}")
            corpus.conversations[number].append(Turn(prompt=prompts[number], reference=reply))
            prompts[number] = prompts[number] + reply.token_ids + _tokens(draw, shape.turn_tokens)
    return corpus


def _tokens(draw: random.Random, count: tuple[int, int]) -> list[int]:
    return draw.choices(TOKEN_IDS, k=draw.randint(*count))


class Client:
    """Asks one thing after the other.

    Args:
        seed: of what is drawn.
        corpus: what there is.
    """

    def __init__(self, seed: str, corpus: Corpus) -> None:
        self._draw, self._corpus = random.Random(seed), corpus
        self._conversation, self._turn, self._salt = 0, -1, SALTS[0]

    def next(self) -> tuple[Turn, Ask]:
        """What to ask now."""
        draw, conversations = self._draw, self._corpus.conversations
        if self._turn + 1 < len(conversations[self._conversation]) and self._turn >= 0 and draw.random() < GOES_ON:
            self._turn += 1
        else:
            # A few are asked for often, most of them seldom.
            self._conversation = _skewed(draw, conversations)
            self._turn = draw.randrange(len(conversations[self._conversation]))
            self._salt = draw.choice(SALTS)
        turn = conversations[self._conversation][self._turn]
        abort = draw.uniform(0.0, 0.5) if draw.random() < ABORTED else None
        return turn, Ask(prompt=turn.prompt, salt=self._salt, tokens=ANSWER_TOKENS, abort_after_s=abort)


def _skewed(draw: random.Random, of: Sequence[object]) -> int:
    return int(len(of) * draw.random() ** 1.5)
