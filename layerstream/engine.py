"""The worker half: runs one step's jobs on the device's streams and reports what is done.

A step is `begin_step`, `start_loads` (before the forward when the plan is gated), then per layer `wait_layer` and
`save_layer` from the model's hooks, then `end_step`; `poll` may come at any time. Nothing here decides anything about
keys or slots, and nothing blocks the calling thread except the CPU device's gates, where that thread is the compute
stream, and `verify`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nvtx

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind, Report, StepPlan
from layerstream.metrics import TransferStats
from layerstream.pipeline.base import Move
from layerstream.timeline import LayerTimes, Timeline
from layerstream.transfers import Transfer

if TYPE_CHECKING:
    from layerstream.geometry import KVGeometry
    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import TransferPath
    from layerstream.streams.base import Device
    from layerstream.verify import Verifier

logger = logging.getLogger(__name__)
_NVTX = nvtx.get_domain("layerstream")


class StreamEngine:
    """Moves the blocks of each step's jobs between KV cache and host pool, layer by layer."""

    def __init__(
        self,
        *,
        device: Device,
        geometry: KVGeometry,
        pool: HostPool,
        path: TransferPath,
        verifier: Verifier | None = None,
        trace_dir: Path | None = None,
        rank: int = 0,
    ) -> None:
        """
        Args:
            device: where the KV cache lives; the engine closes it.
            geometry: pages of the layers, in the order the model runs them.
            pool: the host pool; the engine closes it.
            path: how one layer is moved.
            verifier: compares bytes after every step; blocks the host (option `verify`).
            trace_dir: where timelines of gated loads are written.
            rank: names the timelines.
        """
        self.device = device
        self.geometry = geometry
        self.pool = pool
        self.verifier = verifier
        self._path = path
        self._trace_dir = trace_dir
        self._rank = rank
        self._layers = len(geometry.layers)
        self._ranges = [
            {what: _NVTX.get_event_attributes(message=f"{what} {layer.name}") for what in ("load", "wait", "save")}
            for layer in geometry.layers
        ]
        self._plan: StepPlan | None = None
        self._gated: Transfer | None = None
        self._parked: list[Transfer] = []
        self._save: Transfer | None = None
        self._in_flight: list[Transfer] = []
        # A layer counts as hooked once its hook ran in a step whose hooks ran; until then its load is waited for
        # before the forward.
        self._hooked = bytearray(self._layers)
        self._ran = bytearray(self._layers)
        self._layerwise = False
        self._stats = TransferStats()

    def begin_step(self, plan: StepPlan | None) -> None:
        """Take one step's plan. A step before it that was not ended is ended first."""
        if self._plan is not None:
            self.end_step()
        if any(self._ran):
            self._hooked, self._ran = self._ran, bytearray(self._layers)
        if plan is None or not plan.jobs:
            return
        self._plan = plan
        loads = [job for job in plan.jobs if job.kind is JobKind.LOAD]
        saves = [job for job in plan.jobs if job.kind is JobKind.SAVE]
        if loads:
            self._gated = self._transfer(plan.step, loads)
        self._parked = [self._transfer(plan.step, [job]) for job in plan.jobs if job.kind is JobKind.PARKED_LOAD]
        if saves:
            self._save = self._transfer(plan.step, saves)

    def _transfer(self, step: int, jobs: Sequence[Job]) -> Transfer:
        blocks = [block for job in jobs for block in job.block_ids]
        runs = [part for job in jobs for first, count in job.pool_runs for part in self.pool.split(first, count)]
        move = Move(self.device.table(blocks), runs)
        return Transfer.of(step, tuple(jobs), move, self.device, self._layers, self.geometry.block_bytes)

    def start_loads(self, *, layerwise: bool) -> None:
        """Queue the step's loads; without `layerwise` the compute stream waits for gated ones right here."""
        gated, parked = self._gated, self._parked
        if gated is None and not parked:
            return
        compute = self.device.compute()
        submitted = self.device.event()
        compute.record(submitted)
        for transfer in ([gated] if gated is not None else []) + parked:
            transfer.submitted = submitted
            for layer in range(self._layers):
                _NVTX.push_range(self._ranges[layer]["load"])
                self._path.load_layer(
                    layer, transfer.move, after=submitted, begun=transfer.begun[layer], done=transfer.done[layer]
                )
                _NVTX.pop_range()
        self._layerwise = layerwise
        if gated is not None:
            self._pass_gates(gated, (layer for layer in range(self._layers) if not (layerwise and self._hooked[layer])))

    def _pass_gates(self, load: Transfer, layers: Iterable[int]) -> None:
        if load.submitted is None:
            raise TransferError(
                f"the loads of requests {', '.join(load.requests)} were not started before the forward that needs "
                "them; the caller must start them first (has_sync_kv_loads)"
            )
        compute = self.device.compute()
        for layer in layers:
            if layer in load.gates:
                continue
            arrived, passed = self.device.event(), self.device.event()
            _NVTX.push_range(self._ranges[layer]["wait"])
            try:
                compute.record(arrived)
                compute.wait(load.done[layer])
                compute.record(passed)
            except TransferError as error:
                raise type(error)(
                    f"KV of requests {', '.join(load.requests)} did not arrive at layer "
                    f"{self.geometry.layers[layer].name}: {error}"
                ) from error
            finally:
                _NVTX.pop_range()
            load.gates[layer] = (arrived, passed)

    def wait_layer(self, layer: int) -> None:
        """The model is about to read layer `layer`: keep the compute stream behind its load. Idempotent in a step.

        Raises:
            TransferError: the bytes did not arrive; no recovery is safe at this point.
        """
        self._ran[layer] = 1
        if self._gated is not None:
            self._pass_gates(self._gated, (layer,))

    def save_layer(self, layer: int) -> None:
        """The model has queued its writes to layer `layer`: queue the step's save of it. Idempotent in a step."""
        if self._save is not None and layer not in self._save.queued:
            self._queue_save(self._save, (layer,))

    def _queue_save(self, save: Transfer, layers: Sequence[int]) -> None:
        written = self.device.event()
        self.device.compute().record(written)
        for layer in layers:
            save.queued.add(layer)
            _NVTX.push_range(self._ranges[layer]["save"])
            self._path.save_layer(
                layer,
                save.move,
                after=written,
                begun=save.begun[layer],
                joined=save.joined[layer],
                done=save.done[layer],
            )
            _NVTX.pop_range()

    def end_step(self) -> None:
        """The forward is queued: save what no hook saved, and let nothing later overwrite blocks still being read.

        Raises:
            TransferError: the step was to be gated layer by layer and none of its hooks ran.
            VerifyError: `verify` is on and bytes differ.
        """
        if self._plan is None:
            return
        plan, self._plan = self._plan, None
        gated, save = self._gated, self._save
        if gated is not None:
            if self._layerwise and any(self._hooked) and not any(self._ran):
                raise TransferError(
                    f"step {plan.step} loaded KV of requests {', '.join(gated.requests)} layer by layer, and no layer "
                    "hook ran; start the engine with require_piecewise: true"
                )
            # Layers that did not run in this step are read by later ones.
            self._pass_gates(gated, range(self._layers))
        compute = self.device.compute()
        if any(transfer.submitted is None for transfer in self._parked):
            self.start_loads(layerwise=False)
        ended = self._parked
        if save is not None:
            self._queue_save(save, [layer for layer in range(self._layers) if layer not in save.queued])
            try:
                for joined in save.joined:
                    compute.wait(joined)
            except TransferError:
                # Nothing reads the blocks any more, so the step may go on; `poll` reports the save as failed.
                logger.exception("saving blocks of requests %s failed", ", ".join(save.requests))
            ended.append(save)
        if gated is not None:
            gated.closed = self.device.event()
            compute.record(gated.closed)
            ended.append(gated)
        self._gated, self._parked, self._save = None, [], None
        self._in_flight += ended
        if self.verifier is not None:
            self._stats.verified_blocks += self.verifier.check(ended)

    def poll(self) -> Report | None:
        """What has ended since the last call, or None. Never blocks."""
        if not self._in_flight:
            return None
        report = Report()
        waiting: list[Transfer] = []
        for transfer in self._in_flight:
            try:
                finished = transfer.finished()
            except TransferError:
                logger.exception("moving blocks of requests %s failed", ", ".join(transfer.requests))
                report.failed.update({job.job_id: 1 for job in transfer.jobs})
                continue
            if finished:
                report.done.update({job.job_id: 1 for job in transfer.jobs})
                self._count(transfer)
            else:
                waiting.append(transfer)
        self._in_flight = waiting
        if not report.done and not report.failed:
            return None
        report.stats, self._stats = self._stats, TransferStats()
        return report

    def _count(self, transfer: Transfer) -> None:
        stats = self._stats
        if transfer.kind is JobKind.SAVE:
            stats.save_blocks += transfer.move.count
            stats.save_bytes += transfer.nbytes
            stats.save_seconds += sum(
                self.device.elapsed(begun, done) for begun, done in zip(transfer.begun, transfer.done, strict=True)
            )
            return
        seconds = max(0.0, self.device.elapsed(transfer.begun[0], transfer.done[-1]))
        stats.load_blocks += transfer.move.count
        stats.load_bytes += transfer.nbytes
        stats.load_seconds += seconds
        if transfer.gates:
            stats.gated_load_seconds += seconds
            stats.stall_seconds += sum(self.device.elapsed(*gate) for gate in transfer.gates.values())
            if self._trace_dir is not None:
                self._write_timeline(transfer, self._trace_dir)

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

        def since(event: object) -> float:
            return self.device.elapsed(origin, event)  # type: ignore[arg-type]

        gates = [transfer.gates[layer] for layer in range(self._layers)]
        ends = [*(arrived for arrived, _ in gates[1:]), transfer.closed]
        return Timeline(
            step=transfer.step,
            requests=transfer.requests,
            blocks=transfer.move.count,
            nbytes=transfer.nbytes,
            layers=tuple(
                LayerTimes(
                    layer=self.geometry.layers[layer].name,
                    load_begin=since(transfer.begun[layer]),
                    load_end=since(transfer.done[layer]),
                    gate_begin=since(gates[layer][0]),
                    gate_end=since(gates[layer][1]),
                    compute_end=since(ends[layer]),
                )
                for layer in range(self._layers)
            ),
        )

    def close(self, timeout_s: float) -> bool:
        """Finish queued work and free memory. False if work was still running after `timeout_s`."""
        drained = self.device.close(timeout_s)
        if drained:
            self.pool.close()
        return drained
