"""The tiers beneath the host pool, as the scheduler half uses them: what comes up from them and goes down to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from layerstream.demotions import Demotions
from layerstream.fetches import Fetches
from layerstream.metrics import TierCounts
from layerstream.promotions import Promotions
from layerstream.tier_flights import TierFlights
from layerstream.tiers.grid import ObjectGrid
from layerstream.worth import Worth

if TYPE_CHECKING:
    from layerstream.index import PrefixIndex
    from layerstream.jobs import JobKind, Report, TierJob
    from layerstream.rates import Rates
    from layerstream.tiers.client import TierClient
    from layerstream.write_behind import TierListener

logger = logging.getLogger(__name__)


class Tiering:
    """All tiers of one engine.

    Args:
        tiers: in the order they are to be asked; closed by `close`.
        namespace: `Namespace.digest()` of the engine.
        index: of the host pool.
        world_size: ranks that must end a job before it counts.
        block_bytes: bytes of one block over all layers, on the rank that has most.
        block_hashes: what a block counts for in names of objects (`ObjectGrid`).
        clock: seconds of the engine's own time, never going back.
        writes: whether anything is written to tiers.
        rates: learn what tiers take, and say what of them is worth moving; None: all of it.
        block_tokens: tokens in a block; needed with `rates`.
        bring_all: whether all that a tier has is brought, whatever the rates say.
        timer: seconds by which rates are learned; `clock` may stand still while a step runs.
    """

    def __init__(
        self,
        tiers: Sequence[TierClient],
        *,
        namespace: bytes,
        index: PrefixIndex,
        world_size: int,
        block_bytes: int,
        clock: Callable[[], float],
        block_hashes: int = 1,
        writes: bool = True,
        rates: Rates | None = None,
        block_tokens: int = 0,
        bring_all: bool = False,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        worth = None
        if rates is not None:
            worth = Worth(rates, block_tokens=block_tokens, block_bytes=block_bytes)
        self.clients = tuple(tiers)
        self.stopped = False
        self._flights = TierFlights(world_size=world_size, clock=clock)
        grid = ObjectGrid(namespace=namespace, chunk_blocks=index.chunk_blocks, block_hashes=block_hashes)
        self.demotions = Demotions(
            tiers=[tier for tier in tiers if tier.writes and writes],
            grid=grid,
            index=index,
            flights=self._flights,
            block_bytes=block_bytes,
            timer=timer,
            rates=rates,
            worth=worth,
        )
        self.fetches = Fetches(
            index=index,
            grid=grid,
            flights=self._flights,
            block_bytes=block_bytes,
            arrived=self.demotions.has,
            absent=self.demotions.lacks,
            timer=timer,
            rates=rates,
        )
        self.promotions = Promotions(
            tiers=tiers,
            grid=grid,
            index=index,
            flights=self._flights,
            fetches=self.fetches,
            clock=clock,
            worth=None if bring_all else worth,
        )
        self._told = TierCounts()

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping: jobs wait to be sent, or objects for room.

        What ranks have been sent is no reason to: nobody waits for a write, and whoever waits for a read asks again in
        every step.
        """
        return self._flights.departing or self.demotions.busy

    def listen(self, listener: TierListener) -> None:
        """Tell `listener` of the tiers that are written to and tell what leaves them."""
        for queue in self.demotions.queues:
            queue.listener = listener if queue.tier.tells_gone else None

    def admitted(self, request_id: str, hashes: Sequence[bytes], blocks: int) -> None:
        """A request was admitted, and loads its blocks up to `blocks` from the host pool if that is not 0."""
        self.promotions.let_go(request_id)
        if blocks:
            self.demotions.used(hashes, blocks)

    def finished(self, request_id: str) -> None:
        """A request has ended, or was aborted while it waited."""
        self.promotions.let_go(request_id)
        self.demotions.finished(request_id)

    def depart(self) -> tuple[TierJob, ...]:
        """The jobs made since the last call, for the ranks. Also gives up what is overdue."""
        self._flights.expire()
        self.promotions.step()
        self.demotions.step()
        return self._flights.depart()

    def report(self, report: Report) -> None:
        """Count what ranks have ended."""
        for place, traffic in report.tiers.items():
            if traffic.failures:
                self.clients[place].failed(f"{traffic.failures} jobs failed on a rank; its log has the cause")
        if report.moved:
            self._flights.answer(report.moved)
            self.demotions.published()

    def stop(self) -> None:
        """Use no tier any more. Jobs under way end, and what they bring becomes no hit."""
        if not self.stopped:
            self.stopped = True
            logger.warning(
                "LayerStream: the tiers are off until the engine is restarted: the cache was reset, so the model's "
                "weights may not be those any more by which tiers know them"
            )
        self.promotions.stop()
        self.demotions.stop()
        self._flights.recall()

    def leave(self) -> None:
        """The engine serves no more: what waits to be written is dropped, and counted."""
        self.demotions.stop()

    @property
    def jobs_in_flight(self) -> Mapping[JobKind, int]:
        """Jobs between tiers and host pool that not every rank has ended."""
        return self._flights.counts

    def counts(self) -> TierCounts:
        """Counts since the start."""
        return TierCounts(
            promoted_blocks=self.fetches.blocks,
            fell_requests=self.promotions.fell_requests,
            dropped_objects=self.demotions.dropped_objects,
            passed_blocks=self.promotions.passed_blocks,
        )

    def take_counts(self) -> TierCounts:
        """Counts since the last call."""
        counts = self.counts()
        since = counts.minus(self._told)
        self._told = counts
        return since

    def close(self, timeout_s: float) -> None:
        """Let go of the tiers.

        Args:
            timeout_s: most seconds for that, each tier for itself.
        """
        for client in self.clients:
            client.close(timeout_s)
