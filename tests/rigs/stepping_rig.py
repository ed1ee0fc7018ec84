"""The late rig with all that an engine does in its steps: two of them in flight, drafts, both runners' orders of calls,
and graphs that run no hooks. Reports of ranks come by way of mailboxes.

A step is scheduled, run by every rank, and booked; with `asynchronous` the next one is scheduled and run before it is
booked, as vLLM's engine does. Time passes only where the rig says so.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from layerstream.coordinator import Coordinator
from layerstream.errors import TransferError
from layerstream.hooks.vllm.messages import WorkerReport
from layerstream.jobs import Job, JobKind
from tests.rigs import scheduler_rig
from tests.rigs.fixed_choice import AnyChoice
from tests.rigs.fuzz_setup import Setup
from tests.rigs.known_model import Life, Span
from tests.rigs.late_scheduler_rig import LateSchedulerRig
from tests.rigs.mailbox import Mailbox
from tests.rigs.scheduler_rig import BLOCK
from tests.rigs.stepped_tiers import SteppedTiers


@dataclass(slots=True)
class Step:
    """A step that was scheduled, and what the ranks said once all of them have run it."""

    output: SchedulerOutput
    spans: dict[str, Span]
    combined: ModelRunnerOutput | None = None


class SteppingRig(LateSchedulerRig):
    """See `LateSchedulerRig`.

    Args:
        folder: of the model.
        setup: the engine.
        tiers: those of an engine before it; None: tiers that are empty.
    """

    def __init__(self, folder: Path, setup: Setup, tiers: SteppedTiers | None = None) -> None:
        self.setup = setup
        self.tiers = setup.make_tiers(lambda: self.seconds) if tiers is None else tiers
        self.tiers.clock = lambda: self.seconds
        self.seconds = 0.0
        self.mode = CUDAGraphMode.PIECEWISE
        """How the next steps run."""
        self.modes: Counter[str] = Counter()
        """Steps by how they ran."""
        self.epoch = self.floor = 0
        """Resets of the connector so far, and how many of them had come when nothing was left of the KV before."""
        self.lives: dict[str, Life] = {}
        self.dead = False
        """Whether the engine has stopped, as it must when a load fails that its step has used."""
        self.behind: set[int] = set()
        """Ranks that run nothing for the time being, while others may."""
        self.all_lives: list[Life] = []
        self._pending: deque[Step] = deque()
        self._draft_dice = random.Random(-1 - setup.seed)
        self._patches = ExitStack()
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        self._patches.enter_context(mock.patch("layerstream.hooks.vllm.scheduler.time", clock))
        scheduler = AsyncScheduler if setup.asynchronous else Scheduler
        with (
            mock.patch.object(scheduler_rig, "Scheduler", scheduler),
            mock.patch.object(scheduler_rig, "vllm_config", setup.config_maker(scheduler_rig.vllm_config)),
            self.tiers.installed(),
        ):
            super().__init__(
                folder,
                seed=setup.seed,
                options={**setup.options, "tiers": self.tiers.options},
                num_blocks=setup.blocks,
                step_tokens=setup.step_tokens,
                ranks=setup.ranks,
                replicas=setup.replicas,
                prefix_caching=setup.prefix_caching,
                windows=setup.windows,
            )
        self.scheduler.use_v2_model_runner = setup.second_runner
        if setup.load_mode == "any":
            self.coordinator._chooser = AnyChoice(setup.seed)
        self.mailboxes = [Mailbox(partial(self._spoil, rank)) for rank in range(setup.ranks)]

    @property
    def coordinator(self) -> Coordinator:
        """The connector's."""
        coordinator: Coordinator | None = self.connector.scheduler._coordinator
        assert coordinator is not None
        return coordinator

    @property
    def idle(self) -> bool:
        """Whether the engine would stop stepping."""
        return not (self.scheduler.has_requests() or self._pending)

    def usable(self, name: str) -> bool:
        """Whether a request may come by this name: the engine knows none by it, nor does a step in flight."""
        return name not in self.scheduler.requests and all(name not in step.spans for step in self._pending)

    def add(self, name: str, tokens: Iterable[int], *, max_tokens: int = 1) -> None:
        super().add(name, tokens, max_tokens=max_tokens)
        self.lives[name] = Life(self.requests[name])
        self.all_lives.append(self.lives[name])

    def abort(self, name: str) -> None:
        self.lives[name].aborted = True
        super().abort(name)

    def step(self) -> SchedulerOutput:
        """One turn of the engine's loop: a step is scheduled and run, and the oldest one in flight is booked."""
        self.seconds += 0.002
        for rank in range(self.setup.ranks):
            self._run_some(rank)
        self._run_tiers()
        output = self.scheduler.schedule()
        step = Step(output, {name: self._span_of(name, output) for name in output.num_scheduled_tokens})
        step.combined = self.aggregator.aggregate([self._run(rank, step) for rank in range(self.setup.ranks)])
        self._pending.append(step)
        self.modes[self.mode.name if step.spans else "no forward"] += 1
        more = output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
        if not (self.setup.asynchronous and len(self._pending) < 2 and more):
            self._book()
        return output

    def run_devices(self) -> None:
        """All ranks catch up."""
        for device, adversary in zip(self.devices, self._adversaries, strict=True):
            adversary.run(device)
        self._run_tiers(all_of_it=True)

    def close(self) -> None:
        super().close()
        self._patches.close()

    def _run_tiers(self, *, all_of_it: bool = False) -> None:
        """What waits for tiers goes on, or all of it."""
        tiering = self.coordinator.tiering
        if tiering is not None:
            self.tiers.run_clients(tiering.clients, all_of_it=all_of_it)
        for rank, engine in enumerate(self.engines):
            if engine.mover is not None and not (self.stalled or rank in self.behind):
                self.tiers.run_mover(engine.mover, all_of_it=all_of_it)

    def _run_some(self, rank: int) -> None:
        if rank not in self.behind:
            super()._run_some(rank)

    def _span_of(self, name: str, output: SchedulerOutput) -> Span:
        life, scheduled = self.lives[name], output.num_scheduled_tokens[name]
        request = life.request
        assert request is self.scheduler.requests[name]
        # Where drafts of a step in flight were wrong, only the rank knows yet, and starts earlier.
        flying = [step.spans[name] for step in self._pending if name in step.spans]
        late = sum(span.rejected for span in flying if not span.stale)
        start = request.num_computed_tokens - scheduled - late
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        if -1 in drafts:
            drafts = self._drafts(life, start + scheduled - len(drafts), len(drafts))
        return Span.of(
            life,
            self.scheduler.kv_cache_manager.get_block_ids(name),
            start=start,
            scheduled=scheduled,
            drafts=drafts,
            samples=not request.is_prefill_chunk,
        )

    def _drafts(self, life: Life, first: int, count: int) -> list[int]:
        """Tokens for positions from `first` on, of which none, some or all are right."""
        right = self._draft_dice.randint(0, count)
        return [life.token(first + i) if i < right else 2 + self._draft_dice.randrange(90) for i in range(count)]

    def _run(self, rank: int, step: Step) -> ModelRunnerOutput:
        """A rank takes a step: everything is queued, in the order of the runner's calls."""
        worker, kv, output = self.workers[rank], self.kv[rank], step.output
        metadata = output.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        self.mailboxes[rank].note(metadata.plan)
        full = bool(step.spans) and self.mode is CUDAGraphMode.FULL
        attention = {name: object() for name in self.layers} if step.spans else None
        context: Any = SimpleNamespace(attn_metadata=attention, cudagraph_runtime_mode=self.mode)
        dummy: Any = SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        call: dict[str, Any] = {"attn_metadata": attention} if full and self.setup.second_runner else {}
        if output.has_sync_kv_loads:
            worker.start_load_kv(dummy if call else context, **call)
        for index, layer in enumerate(self.layers if step.spans else ()):
            for span in step.spans.values():
                self._queue_write(rank, kv[layer], index, span)
            if not full:
                worker.wait_for_layer_load(layer)
            for span in step.spans.values():
                self._queue_check(rank, kv[layer], index, span)
            if not full:
                worker.save_kv_layer(layer, kv[layer], None)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(dummy if self.setup.second_runner else context, **call)
        # With a drafter the first runner collects reports first, and ends the step behind the drafter.
        late_end = self.setup.drafts > 0 and not self.setup.second_runner
        if not late_end:
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self._meta(rank),
        )
        if late_end:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        names = list(step.spans)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[list(span.output) for span in step.spans.values()],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=report,
        )

    def _meta(self, rank: int) -> WorkerReport | None:
        meta = None if rank in self.held_back else self.workers[rank].build_connector_worker_meta()
        report = self.mailboxes[rank].post(meta.report if isinstance(meta, WorkerReport) else None)
        return None if report is None else WorkerReport(report)

    def _book(self) -> None:
        step = self._pending.popleft()
        failed = [mailbox.injected[f"{what} failed"] for mailbox in self.mailboxes for what in ("LOAD", "released")]
        combined = step.combined
        assert combined is not None
        report = combined.kv_connector_output
        if not step.spans and report is not None and report.is_empty():
            # As an executor without processes of its own has it.
            combined = replace(combined, kv_connector_output=None)
        try:
            self.scheduler.update_from_output(step.output, combined)
        except TransferError:
            if not any(failed):
                raise
            self.dead = True
            return
        if self.setup.drafts and not self.setup.asynchronous:
            names = [name for name, span in step.spans.items() if span.output and name in self.scheduler.requests]
            drafts = [
                self._drafts(self.lives[name], self.requests[name].num_tokens, self.setup.drafts) for name in names
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _queue_write(self, rank: int, cache: torch.Tensor, layer: int, span: Span) -> None:
        blocks = span.blocks[self.group_of(layer)][span.start :]
        slots = torch.arange(span.start, span.stop) % BLOCK
        values, epoch = span.kv(layer)[span.start :], self.epoch

        def write() -> None:
            cache[blocks, 0, slots, :-1] = values
            cache[blocks, 0, slots, -1] = epoch

        self._queue(rank, write)

    def _queue_check(self, rank: int, cache: torch.Tensor, layer: int, span: Span) -> None:
        first, group = self.first_seen(layer, span.start), self.group_of(layer)
        name, slots = span.life.request.request_id, torch.arange(first, span.stop) % BLOCK
        want, floor, blocks = span.kv(layer)[first:], self.floor, span.blocks[group][first:]

        def check() -> None:
            read = cache[blocks, 0, slots]
            wrong = (read[:, :-1] != want).any(dim=1)
            old = read[:, -1] < floor
            for what, which in (("wrong KV", wrong), ("KV from before a reset", old & ~wrong)):
                if which.any():
                    tokens = (first + which.nonzero()[:, 0]).tolist()
                    self.wrong.append(
                        f"request {name}, rank {rank}, layer {layer}: {what} at {tokens[:8]} of {span.stop}"
                    )

        self._queue(rank, check)

    def _queue(self, rank: int, operation: Any) -> None:
        device = self.devices[rank]
        device.work(device.compute(), 1e-5, operation)
        self._run_some(rank)

    def _spoil(self, rank: int, job: Job) -> None:
        """A job that failed leaves no byte that means anything where it was to write."""
        if job.kind is JobKind.SAVE:
            for layer in range(scheduler_rig.LAYERS):
                for first, count in job.groups[self.group_of(layer)].pool_runs:
                    self.engines[rank].pool.span(layer, first, count).fill_(0xEE)
        elif job.kind is JobKind.PARKED_LOAD:
            for layer, cache in enumerate(self.kv[rank].values()):
                cache[list(job.groups[self.group_of(layer)].block_ids)] = -7
