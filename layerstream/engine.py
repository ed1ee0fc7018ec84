"""The worker half: runs one step's jobs on the device's streams and reports what is done.

A step is `begin_step`, `start_loads` (before the forward when the plan is gated), then per layer `wait_layer` and
`save_layer` from the model's hooks, then `end_step`; `poll` may come at any time. Nothing here decides anything about
keys or slots, and nothing blocks the calling thread except the CPU device's gates, where that thread is the compute
stream, and `verify`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerstream.errors import RaceError, TransferError, TransferTimeout
from layerstream.jobs import Job, JobKind, Report, StepPlan, TierJob
from layerstream.ledger import Ledger
from layerstream.pipeline.base import Move
from layerstream.ranges import Ranges
from layerstream.transfers import Forward, Part, Transfer

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry
    from layerstream.graphs.in_graph import InGraphGates
    from layerstream.host_pool import HostPool
    from layerstream.pipeline.choice import PathChoice
    from layerstream.pipeline.graph_load import GraphLoad
    from layerstream.sanitize import Sanitizer
    from layerstream.streams.base import Device, Event, Stream
    from layerstream.tiers.mover import TierMover
    from layerstream.verify import Verifier

logger = logging.getLogger(__name__)

GROUPS_AHEAD = 4
"""Groups of layers whose load is queued before the hook that waits for them. Queueing all of a load first would hold up
the first layer by the host's time for all of them (32 layers of a long prefix are hundreds of copies and launches), and
fill the device's launch queues, where the host would block."""


class StreamEngine:
    """Moves the blocks of each step's jobs between KV cache and host pool, layer by layer."""

    def __init__(
        self,
        *,
        device: Device,
        geometry: KVGeometry,
        pool: HostPool,
        paths: PathChoice,
        group_bytes: int = 0,
        layers_per_gate: int | None = None,
        whole_ahead: bool = False,
        graph_load: GraphLoad | None = None,
        in_graph: InGraphGates | None = None,
        verifier: Verifier | None = None,
        sanitizer: Sanitizer | None = None,
        mover: TierMover | None = None,
        writes: bool = True,
        trace_dir: Path | None = None,
        rank: int = 0,
    ) -> None:
        """
        Args:
            device: where the KV cache lives; the engine closes it.
            geometry: pages of the layers, in the order the model runs them.
            pool: the host pool; the engine closes it.
            paths: how layers are moved.
            group_bytes: layers smaller than this travel together, up to a quarter of them, until they are as large.
            layers_per_gate: that many layers travel together, whatever their size.
            whole_ahead: queue all of a load before the forward, and not `GROUPS_AHEAD` groups: where queueing is cheap
                beside the model, and copies spread over its forward would only disturb it.
            graph_load: submits gated loads that it takes.
            in_graph: gates captured in FULL graphs.
            verifier: compares bytes after every step; blocks the host (option `verify`).
            sanitizer: is told what the model touches (option `sanitize`).
            mover: moves bytes between the pool and tiers; the engine closes it.
            writes: whether this rank saves, and moves objects of tiers; otherwise a rank with the same KV does, to the
                pool that both of them read.
            trace_dir: where timelines of gated loads are written.
            rank: names the timelines, and this rank in reports of a pool that grows.
        """
        self.device = device
        self.geometry = geometry
        self.pool = pool
        self.verifier = verifier
        self.sanitizer = sanitizer
        self.mover = mover
        self.writes = writes
        self._paths = paths
        self._group_bytes = group_bytes
        self._layers_per_gate = layers_per_gate
        self._whole_ahead = whole_ahead
        self._graph_load = graph_load
        self.in_graph = in_graph
        names = [layer.name for layer in geometry.layers]
        self._layers = len(names)
        self._ranges = Ranges(names)
        self._plan: StepPlan | None = None
        self._gated: Transfer | None = None
        self._parked: list[Transfer] = []
        self._released: list[Transfer] = []
        """Parked loads of earlier steps that this step's forward waits for."""
        self._save: Transfer | None = None
        self._begun: Event | None = None
        """The compute stream's point before a forward that is measured."""
        # A layer counts as hooked once its hook ran in a step whose hooks ran; until then its load is waited for
        # before the forward.
        self._hooked = bytearray(self._layers)
        self._ran = bytearray(self._layers)
        self._layerwise = False
        self._started = False
        """Whether this step's loads were started."""
        self._ledger = Ledger(device=device, pool=pool, layers=names, trace_dir=trace_dir, rank=rank)

    @property
    def calibrated(self) -> tuple[tuple[int, float], ...]:
        """(Bytes over all layers, seconds) of loads, as a calibration measured them; empty without one."""
        return tuple((nbytes * self._layers, seconds * self._layers) for nbytes, seconds in self._paths.calibrated)

    def begin_step(self, plan: StepPlan | None) -> None:
        """Take one step's plan. A step before it that was not ended is ended first."""
        # The first step comes after every graph was captured.
        self.pool.start_pinning()
        if self._plan is not None:
            self.end_step()
        if broken := [*filter(None, (self._gated, self._save)), *self._parked]:
            # Queued again, their work would write blocks that may be somebody else's by now.
            raise TransferError(
                f"step {broken[0].step} broke off with transfers of requests {', '.join(broken[0].requests)}; close "
                "the engine: it cannot tell which blocks are still written"
            )
        if any(self._ran):
            self._hooked, self._ran = self._ran, bytearray(self._layers)
        if plan is None:
            return
        if plan.tier_jobs:
            self._move_objects(plan.tier_jobs)
        if self.sanitizer is not None:
            self.sanitizer.begin_step(plan.model)
        if not (plan.jobs or plan.released or plan.work is not None) and self.sanitizer is None:
            return
        self._plan = plan
        self._started = False
        # What has ended here is waited for by other ranks, if by any.
        self._released = self._ledger.parked(plan.released) if plan.released else []
        self._ranges.begin_step(plan.step)
        self._begun = self._mark() if plan.work is not None and self.writes else None
        batches = self._batches(plan.jobs)
        if not batches:
            return
        # One upload a step, however many jobs: a small copy to a GPU costs about as much as a large one.
        table = self.device.table([block for jobs in batches for block in _blocks(jobs)])
        first = 0
        for jobs in batches:
            stop = first + sum(len(group.block_ids) for job in jobs for group in job.groups)
            transfer = self._transfer(plan.step, jobs, table[first:stop])
            first = stop
            if transfer.kind is JobKind.LOAD:
                self._gated = transfer
            elif transfer.kind is JobKind.SAVE:
                self._save = transfer
            else:
                self._parked.append(transfer)

    def _batches(self, jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
        """Jobs that move together: all loads, all saves, and each parked load by itself."""
        loads = tuple(job for job in jobs if job.kind is JobKind.LOAD)
        saves = tuple(job for job in jobs if job.kind is JobKind.SAVE)
        parked = tuple(job for job in jobs if job.kind is JobKind.PARKED_LOAD)
        if not self.writes:
            self._ledger.elsewhere(saves)
            saves = ()
        return [batch for batch in (loads, saves, *((job,) for job in parked)) if batch]

    def _move_objects(self, jobs: Sequence[TierJob]) -> None:
        if not self.writes:
            self._ledger.elsewhere(jobs)
            return
        assert self.mover is not None, "tiers are on for every rank or for none"
        if self.verifier is not None:
            self.verifier.promoted(jobs)
        self.mover.submit(jobs)

    def _transfer(self, step: int, jobs: tuple[Job, ...], table: torch.Tensor) -> Transfer:
        """Describe what moves these jobs, whose blocks lie in `table` one KV cache group after the other."""
        moves: list[Move | None] = []
        first, anything = 0, len(table) > 0
        for groups in zip(*(job.groups for job in jobs), strict=True):
            ids = [block for group in groups for block in group.block_ids]
            runs = [run for group in groups for page, count in group.pool_runs for run in self.pool.split(page, count)]
            passed = anything and not (ids or runs)
            moves.append(None if passed else Move(ids, table[first : first + len(ids)], runs))
            first += len(ids)
        most = max(move.count for move in moves if move is not None)
        path = self._paths.save if jobs[0].kind is JobKind.SAVE else self._paths.load(most)
        group = self._layers_per_gate or self._group_size(most)
        return Transfer.of(step, jobs, tuple(moves), path, geometry=self.geometry, group=group)

    def _group_size(self, blocks: int) -> int:
        layer_bytes = blocks * self.geometry.block_bytes // self._layers
        return max(1, min(-(-self._group_bytes // max(1, layer_bytes)), self._layers // 4))

    def start_loads(self, *, layerwise: bool, in_graph: bool = False) -> None:
        """Queue the step's loads, once a step. What neither hooks nor a graph will gate, of them and of released loads,
        the compute stream waits for right here.

        Args:
            layerwise: this step's hooks will run.
            in_graph: this step replays a graph in which waits were captured.
        """
        started, self._started = self._started, True
        if any(transfer.submitted is None for transfer in [*filter(None, (self._gated,)), *self._parked]):
            self._layerwise = layerwise
            self._submit_loads(layerwise=layerwise, in_graph=in_graph)
        if self._released and not started:
            self._layerwise = layerwise
            for load in self._released:
                self._pass_gates(load, self._unhooked(layerwise))

    def _submit_loads(self, *, layerwise: bool, in_graph: bool) -> None:
        gated, parked = self._gated, self._parked
        compute = self.device.compute()
        armed = in_graph and gated is not None and self._arm(gated, compute)
        table = None
        if gated is not None and self._graph_load is not None and self._graph_load.takes(gated.blocks):
            table = self.device.table(self._graph_load.table(_only(gated.moves)))
        submitted = self.device.event()
        compute.record(submitted)
        if gated is not None:
            gated.submitted, gated.layerwise = submitted, layerwise
            if table is not None and self._graph_load is not None:
                self._submit_graph(self._graph_load, gated, table, submitted)
            else:
                self._queue_load(gated, len(gated.groups) if armed or self._whole_ahead else GROUPS_AHEAD)
        if gated is not None and not armed:
            self._pass_gates(gated, self._unhooked(layerwise))
        for transfer in parked:
            transfer.submitted = submitted
            # One queued between the layers of a gated load would hold up the forward: it waits for their last.
            if gated is None or len(gated.part_of) == self._layers:
                self._queue_parked(transfer)

    def _unhooked(self, layerwise: bool) -> Iterator[int]:
        """Layers that no hook of this step can be relied on to wait for."""
        return (layer for layer in range(self._layers) if not (layerwise and self._hooked[layer]))

    def _queue_parked(self, load: Transfer) -> None:
        try:
            self._queue_load(load, len(load.groups))
        except RaceError:
            raise
        except Exception:
            # Nobody's forward waits for it, so only its request fails.
            logger.exception("loading blocks of requests %s failed", ", ".join(load.requests))

    def _arm(self, load: Transfer, compute: Stream) -> bool:
        load.in_graph = self.in_graph is not None and self.in_graph.try_arm(compute)
        return load.in_graph

    def _submit_graph(self, graph: GraphLoad, load: Transfer, table: torch.Tensor, submitted: Event) -> None:
        begun, load.ended = self.device.event(), self.device.event()
        load.path_name = graph.name
        self._ranges.push_load(0, self._layers - 1, graph.name, load.nbytes)
        try:
            graph.submit(_only(load.moves), table, after=submitted, begun=begun, done=load.ended)
        finally:
            self._ranges.pop()
        for layer, done in enumerate(graph.layer_done):
            self._queued(load, Part((layer,), begun, done, joined=done))

    def _queue_load(self, load: Transfer, groups: int) -> None:
        """Queue what is still missing of the load's first `groups` groups."""
        assert load.submitted is not None
        for layers in load.groups[len(load.parts) : groups]:
            begun, done = self.device.event(), self.device.event()
            self._ranges.push_load(layers[0], layers[-1], load.path.name, self._bytes(load, layers))
            try:
                batches = load.batches(layers)
                if not batches:
                    # Windows have passed all there is of these layers.
                    begun, done = load.submitted, load.submitted
                for number, (some, move) in enumerate(batches):
                    # The last one's end is the end of all, also if it breaks off: they run in their order.
                    first, done = (self.device.event(), self.device.event()) if number else (begun, done)
                    load.path.load(some, move, after=load.submitted, begun=first, done=done)
            except BaseException:
                load.failed = True
                raise
            finally:
                self._ranges.pop()
                self._queued(load, Part(layers, begun, done, joined=done))

    def _queued(self, load: Transfer, part: Part) -> None:
        load.add(part)
        if load.in_graph and self.in_graph is not None:
            for layer in part.layers:
                self.in_graph.open(layer, part.done)

    def _pass_gates(self, load: Transfer, layers: Iterable[int]) -> None:
        if load.submitted is None:
            raise TransferError(
                f"the loads of requests {', '.join(load.requests)} were not started before the forward that needs "
                "them; the caller must start them first (has_sync_kv_loads)"
            )
        compute = self.device.compute()
        for layer in layers:
            if load.failed:
                raise TransferError(f"the loads of requests {', '.join(load.requests)} broke off; the engine must stop")
            if load.ended is None:
                self._queue_load(load, load.group_number(layer) + 1 + GROUPS_AHEAD)
            part = load.part_of[layer]
            if part.gate is not None:
                continue
            arrived, passed = self.device.event(), self.device.event()
            self._ranges.push_wait(part.layers[0], part.layers[-1], load.path_name, self._bytes(load, part.layers))
            try:
                compute.record(arrived)
                compute.wait(part.done)
                compute.record(passed)
            except TransferError as error:
                raise type(error)(
                    f"KV of requests {', '.join(load.requests)} did not arrive at layer "
                    f"{self.geometry.layers[layer].name}: {error}"
                ) from error
            finally:
                self._ranges.pop()
            part.gate = (arrived, passed)

    def _pass_released(self, layers: Sequence[int]) -> None:
        if not self._started:
            raise TransferError(
                f"the forward began before the loads of requests {', '.join(self._released[0].requests)}, which other "
                "requests may read by now, were waited for; the caller must start loads first (has_sync_kv_loads)"
            )
        for load in self._released:
            self._pass_gates(load, layers)

    def wait_layer(self, layer: int) -> None:
        """The model is about to read layer `layer`: keep the compute stream behind its load. Idempotent in a step.

        Raises:
            TransferError: the bytes did not arrive; no recovery is safe at this point.
        """
        self._ran[layer] = 1
        if self.sanitizer is not None:
            self.sanitizer.wrote(layer)
        if self._gated is not None:
            self._pass_gates(self._gated, (layer,))
        if self._released:
            self._pass_released((layer,))
        if self.sanitizer is not None:
            self.sanitizer.read(layer)

    def save_layer(self, layer: int) -> None:
        """The model has queued its writes to layer `layer`: queue the step's save of it, as soon as the layers that
        travel with it are written too. Idempotent in a step."""
        save = self._save
        if save is None or save.failed or layer in save.written:
            return
        save.written.add(layer)
        group = save.group_of(layer)
        if save.written.issuperset(group):
            self._queue_save(save, group)

    def _queue_save(self, save: Transfer, layers: tuple[int, ...]) -> None:
        written, begun, joined, done = (self.device.event() for _ in range(4))
        self.device.compute().record(written)
        self._ranges.push_save(layers[0], layers[-1], save.path.name, self._bytes(save, layers))
        try:
            for number, (some, move) in enumerate(save.batches(layers)):
                first = begun
                if number:
                    first, joined, done = (self.device.event() for _ in range(3))
                save.path.save(some, move, after=written, begun=first, joined=joined, done=done)
        except RaceError:
            raise
        except Exception:
            logger.exception("saving blocks of requests %s failed", ", ".join(save.requests))
            save.failed = True
        finally:
            self._ranges.pop()
        save.add(Part(layers, begun, done, joined))

    def _bytes(self, transfer: Transfer, layers: tuple[int, ...]) -> int:
        return sum(
            move.count * self.geometry.layers[layer].page_bytes
            for some, move in transfer.batches(layers)
            for layer in some
        )

    def end_step(self) -> None:
        """The forward is queued: save what no hook saved, and let nothing later overwrite blocks still being read.

        Raises:
            TransferError: the step was to be gated layer by layer and none of its hooks ran.
            TransferTimeout: something is still being read or written that the next step may touch.
            RaceError: `sanitize` is on and two accesses conflict.
            VerifyError: `verify` is on and bytes differ.
        """
        if self._plan is None:
            return
        plan, self._plan = self._plan, None
        gated, save = self._gated, self._save
        compute = self.device.compute()
        waited = [*filter(None, (gated,)), *self._released]
        if gated is not None and gated.in_graph and self.in_graph is not None:
            self.in_graph.end_step(compute)
        if waited and self._layerwise and any(self._hooked) and not any(self._ran):
            raise TransferError(
                f"step {plan.step} waited for KV of requests {', '.join(waited[0].requests)} layer by layer, and no "
                "layer hook ran; start the engine with require_piecewise: true"
            )
        # Layers that did not run in this step are read by later ones.
        for load in waited:
            self._pass_gates(load, range(self._layers))
        self._measure(plan, gated)
        if self.sanitizer is not None:
            self.sanitizer.end_step()
        if any(transfer.submitted is None for transfer in self._parked):
            self.start_loads(layerwise=False)
        for transfer in self._parked:
            if not transfer.parts:
                self._queue_parked(transfer)
        ended = self._parked
        if save is not None:
            self._join_save(save, compute)
            ended.append(save)
        if gated is not None:
            gated.closed = self.device.event()
            compute.record(gated.closed)
            ended.append(gated)
        self._gated, self._parked, self._released, self._save = None, [], [], None
        self._ledger.add(ended)
        self._ranges.end_step()
        if self.verifier is not None:
            self._ledger.verified(self.verifier.check(ended))

    def _measure(self, plan: StepPlan, gated: Transfer | None) -> None:
        begun, self._begun = self._begun, None
        # What nodes of a graph wait for cannot be told from what it computes, nor can what was waited for in which of
        # the steps that a released load outlasts.
        if (
            begun is not None
            and plan.work is not None
            and not (self._released or (gated is not None and gated.in_graph))
        ):
            self._ledger.measure(Forward(work=plan.work, begun=begun, ended=self._mark(), load=gated))

    def _mark(self) -> Event:
        """The compute stream's point at this moment."""
        event = self.device.event()
        self.device.compute().record(event)
        return event

    def _join_save(self, save: Transfer, compute: Stream) -> None:
        """Queue what no hook saved, and keep the compute stream behind the last read of the blocks."""
        # All of it in one call: after a FULL graph that is every layer, and one launch takes them.
        rest = tuple(layer for layer in range(self._layers) if layer not in save.part_of)
        if rest and not save.failed:
            self._queue_save(save, rest)
        try:
            # Reads of one direction end in their order, so the last part's end is the end of all.
            compute.wait(save.parts[-1].joined)
        except TransferTimeout:
            # The blocks may still be read: the save would end, and be reported, with what is written to them next.
            raise
        except TransferError:
            # Nothing reads the blocks any more, so the step may go on; `poll` reports the save as failed.
            logger.exception("saving blocks of requests %s failed", ", ".join(save.requests))

    def poll(self) -> Report | None:
        """What has ended since the last call, or None. Never waits for the device."""
        report = self._ledger.poll()
        if self.mover is None:
            return report
        both = Report() if report is None else report
        return both if self.mover.poll(both) else report

    def close(self, timeout_s: float) -> bool:
        """Finish queued work and free memory. False if work was still running after `timeout_s`."""
        started = time.monotonic()
        drained = self.device.close(timeout_s)
        if self.mover is not None:
            # What tiers are still to get is in the pool, and worth the rest of the time.
            drained = self.mover.close(max(0.0, timeout_s - (time.monotonic() - started))) and drained
        if drained:
            self.pool.close()
        return drained


def _blocks(jobs: Sequence[Job]) -> Iterator[int]:
    """Block ids of jobs, one KV cache group after the other."""
    for groups in zip(*(job.groups for job in jobs), strict=True):
        for group in groups:
            yield from group.block_ids


def _only(moves: Sequence[Move | None]) -> Move:
    """What is moved where there is one KV cache group."""
    (move,) = moves
    assert move is not None
    return move
