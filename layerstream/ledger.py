"""Transfers that have not ended yet, and what a worker half reports of those that have: jobs, counts, timelines."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind, Report, TierJob
from layerstream.measured import Measured
from layerstream.metrics import LoadTimes, TransferStats
from layerstream.ranges import layers_label
from layerstream.timeline import LayerTimes, Timeline

if TYPE_CHECKING:
    from layerstream.host_pool import HostPool
    from layerstream.streams.base import Device, Event
    from layerstream.transfers import Forward, Transfer

logger = logging.getLogger(__name__)


class Ledger:
    """Keeps transfers until their work is done, since that work uses what they own."""

    def __init__(
        self, *, device: Device, pool: HostPool, layers: Sequence[str], trace_dir: Path | None, rank: int
    ) -> None:
        """
        Args:
            device: tells the time between events.
            pool: may still be growing, which reports say.
            layers: the engine's layer names.
            trace_dir: where timelines of gated loads are written; None writes none.
            rank: names the timelines, and this rank in reports of a pool that grows.
        """
        self._device = device
        self._pool = pool
        self._layers = tuple(layers)
        self._trace_dir = trace_dir
        self._rank = rank
        self._in_flight: list[Transfer] = []
        self._forwards: list[Forward] = []
        self._measured = Measured()
        self._elsewhere = Report()
        """Jobs that other ranks do for this one."""
        self._stats = TransferStats()
        self._loads: list[LoadTimes] = []
        self._told_slots = pool.ready_slots
        """Slots of the pool that the scheduler half knows to be ready."""

    def add(self, transfers: Sequence[Transfer]) -> None:
        """Their step has ended; from here on they may be reported."""
        self._in_flight += transfers

    def parked(self, job_ids: Collection[int]) -> list[Transfer]:
        """The parked loads of these jobs that were not reported done or failed yet."""
        return [
            transfer
            for transfer in self._in_flight
            if transfer.kind is JobKind.PARKED_LOAD and transfer.jobs[0].job_id in job_ids
        ]

    def measure(self, forward: Forward) -> None:
        """A step has ended whose forward is to be measured; a report tells how long it took."""
        self._forwards.append(forward)

    def elsewhere(self, jobs: Sequence[Job | TierJob]) -> None:
        """A rank that shares its pool with this one moves these: here there is nothing to wait for."""
        for job in jobs:
            if isinstance(job, TierJob):
                self._elsewhere.moved[job.job_id] = 1, len(job.objects)
            else:
                self._elsewhere.done[job.job_id] = 1

    def verified(self, blocks: int) -> None:
        """Count blocks whose bytes were compared."""
        self._stats.verified_blocks += blocks

    def poll(self) -> Report | None:
        """What has ended since the last call, or None. Never blocks."""
        ready = self._pool.ready_slots
        nothing = not (self._in_flight or self._forwards or self._elsewhere.done or self._elsewhere.moved)
        if nothing and ready == self._told_slots:
            return None
        report, self._elsewhere = self._elsewhere, Report()
        if ready > self._told_slots:
            self._told_slots = report.ready_slots[self._rank] = ready
        waiting: list[Transfer] = []
        for transfer in self._in_flight:
            try:
                released, finished = transfer.released(), transfer.finished()
            except TransferError:
                logger.exception("moving blocks of requests %s failed", ", ".join(transfer.requests))
                report.failed.update({job.job_id: 1 for job in transfer.jobs})
                continue
            if released:
                report.released[transfer.jobs[0].job_id] = 1
            if finished:
                report.done.update({job.job_id: 1 for job in transfer.jobs})
                self._count(transfer)
            else:
                waiting.append(transfer)
        self._in_flight = waiting
        self._forwards = [forward for forward in self._forwards if not self._timed(forward)]
        # What was measured can wait for what will be reported anyway.
        alone = self._measured and not self._in_flight
        told = report.done or report.failed or report.released or report.ready_slots or report.moved
        if not (told or alone):
            return None
        report.stats, self._stats = self._stats, TransferStats()
        report.measured, self._measured = self._measured, Measured()
        report.loads, self._loads = tuple(self._loads), []
        return report

    def _timed(self, forward: Forward) -> bool:
        """Whether nothing more is to be done for a forward: it is over and counted, or failed."""
        try:
            if not forward.ended.done():
                return False
            seconds = self._device.elapsed(forward.begun, forward.ended) - forward.waited(self._device)
        except TransferError:
            return True
        self._measured.steps.append((forward.work.tokens, forward.work.pairs, seconds))
        return True

    def _count(self, transfer: Transfer) -> None:
        stats = self._stats
        if transfer.kind is JobKind.SAVE:
            stats.save_blocks += transfer.blocks
            stats.save_bytes += transfer.nbytes
            stats.save_seconds += sum(self._device.elapsed(part.begun, part.done) for part in transfer.parts)
            self._measured.saves.append((transfer.path_name, transfer.nbytes, transfer.busy_seconds(self._device)))
            return
        seconds = transfer.busy_seconds(self._device)
        stats.load_blocks += transfer.blocks
        stats.load_bytes += transfer.nbytes
        stats.load_seconds += seconds
        self._measured.loads.append((transfer.path_name, transfer.nbytes, transfer.exposed_seconds(self._device)))
        # Where compute has not reached a gate of a parked load when all has arrived, nothing waits there.
        gates = [part.gate for part in transfer.parts if part.gate and part.gate[1].done()]
        stall: float | None = None
        if (transfer.kind is JobKind.LOAD or gates) and not transfer.in_graph:
            stall = sum(self._device.elapsed(*gate) for gate in gates)
            stats.gated_load_seconds += seconds
            stats.stall_seconds += stall
            # The events of a load submitted as one graph have no times.
            if self._trace_dir is not None and transfer.kind is JobKind.LOAD and transfer.ended is None:
                self._write_timeline(transfer, self._trace_dir)
        self._loads.append(LoadTimes(transfer.mode, seconds, stall))

    def _write_timeline(self, transfer: Transfer, folder: Path) -> None:
        try:
            self._timeline(transfer).write(folder, self._rank)
        except OSError as error:
            logger.warning("LayerStream: no more timelines, %s cannot be written: %s", folder, error)
            self._trace_dir = None

    def _timeline(self, transfer: Transfer) -> Timeline:
        assert transfer.submitted is not None
        assert transfer.closed is not None
        origin = transfer.submitted

        def since(event: Event) -> float:
            return self._device.elapsed(origin, event)

        parts = [(part, part.gate) for part in transfer.parts if part.gate is not None]
        ends = [*(arrived for _, (arrived, _) in parts[1:]), transfer.closed]
        names = self._layers
        return Timeline(
            step=transfer.step,
            requests=transfer.requests,
            blocks=transfer.blocks,
            nbytes=transfer.nbytes,
            layers=tuple(
                LayerTimes(
                    layer=layers_label(names[part.layers[0]], names[part.layers[-1]]),
                    load_begin=since(part.begun),
                    load_end=since(part.done),
                    gate_begin=since(arrived),
                    gate_end=since(passed),
                    compute_end=since(end),
                )
                for (part, (arrived, passed)), end in zip(parts, ends, strict=True)
            ),
        )
