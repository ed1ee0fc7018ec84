"""The scheduler rig on virtual devices: between any two steps each rank runs as much, or as little, as it likes.

The scheduler half is the real one under vLLM's real scheduler; its ranks may be arbitrarily late. The model's writes
and checks are queued on the compute stream like any kernel, so a check sees what a GPU could have seen then.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from layerstream.backends import open_device, open_path
from layerstream.engine import StreamEngine
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.virtual import VirtualDevice
from tests.rigs.adversary import Adversary
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig

PAGE_BYTES = 8 * 4 * BLOCK
"""Of the rig's caches: `int64[BLOCK, 4]`."""
RING_BYTES = 2 * 3 * PAGE_BYTES
"""Two pieces of three pages: every longer transfer wraps around."""


class LateSchedulerRig(SchedulerRig):
    """See `SchedulerRig`. What attention read wrongly is collected in `wrong`; with `sanitize`, which is on unless told
    otherwise, a race is an error at the step that queues its second half."""

    def __init__(self, folder: Path, *, seed: int, options: dict[str, Any], **arguments: Any) -> None:
        """
        Args:
            folder: for the model's config.
            seed: of the order in which things run.
            options: of the connector.
            arguments: see `SchedulerRig`.
        """
        made: list[VirtualDevice] = []
        self.wrong: list[str] = []
        """What attention read that it should not have."""
        self.parked_aborts = 0
        """Requests that were aborted while their load was under way."""
        self.stalled = False
        """Whether the ranks run nothing for the time being."""
        self._dice = random.Random(seed)

        def on_virtual_device(device: torch.device) -> Any:
            _, pinner, kernels = open_device(device)
            made.append(VirtualDevice())
            return made[-1], pinner, kernels

        def with_small_rings(name: str, **parts: Any) -> Any:
            return open_path(name, **{**parts, "staging_bytes": 2 * RING_BYTES})

        with (
            mock.patch("layerstream.assembly.open_device", on_virtual_device),
            mock.patch("layerstream.assembly.open_path", with_small_rings),
            mock.patch("layerstream.pipeline.staged.PIECE_BYTES", RING_BYTES // 2),
        ):
            super().__init__(folder, options=options, **arguments)
        # Ranks that share a pool are made at once, in any order.
        engines = [cast(Any, engine.device) for engine in self.engines]
        self.devices: list[VirtualDevice] = [getattr(device, "inner", device) for device in engines]
        assert set(self.devices) == set(made)
        self._adversaries = [Adversary(random.Random(self._dice.random())) for _ in self.devices]
        for device in self.devices:
            device.run()

    @property
    def engines(self) -> list[StreamEngine]:
        """Per rank."""
        return [cast(StreamEngine, worker.worker.engine) for worker in self.workers]

    @property
    def recorders(self) -> list[RecordingDevice]:
        """Per rank; none without `sanitize`."""
        return [engine.device for engine in self.engines if isinstance(engine.device, RecordingDevice)]

    def abort(self, name: str) -> None:
        self.parked_aborts += self.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        super().abort(name)

    def step(self) -> SchedulerOutput:
        for rank in range(len(self.devices)):
            self._run_some(rank)
        return super().step()

    def run(self, limit: int = 10_000) -> int:
        """As `SchedulerRig.run`; then the devices run what is left."""
        steps = 0
        while self.scheduler.has_requests():
            assert steps < limit, f"still busy after {limit} steps"
            steps += 1
            self.step()
        for device, adversary in zip(self.devices, self._adversaries, strict=True):
            adversary.run(device)
        return steps

    def forget_cached(self) -> None:
        """Let the engine forget what it has cached of requests that have ended, so that later ones load."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null})

    def _write(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        request, start, stop = self._span(name, scheduled)
        blocks, slots = self._places(name, stop, layer)
        values = self._values(request, stop, layer)[start:, None]

        def write() -> None:
            cache[blocks[start:], 0, slots[start:]] = values

        self._work(cache, write)

    def _check(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        request, start, stop = self._span(name, scheduled)
        first = self.first_seen(layer, start)
        blocks, slots = (places[first:] for places in self._places(name, stop, layer))
        want = self._values(request, stop, layer)[first:, None].expand(-1, 4)

        def check() -> None:
            read = cache[blocks, 0, slots]
            if not torch.equal(read, want):
                tokens = (first + (read != want).any(dim=1).nonzero()[:, 0]).tolist()
                self.wrong.append(f"request {name}, layer {layer}: wrong KV at tokens {tokens[:8]} of {stop}")

        self._work(cache, check)

    def _work(self, cache: torch.Tensor, operation: Any) -> None:
        """Queue the model's work on the rank that `cache` belongs to, and let some of what is queued run."""
        rank = next(rank for rank, tensors in enumerate(self.kv) if any(tensor is cache for tensor in tensors.values()))
        device = self.devices[rank]
        device.work(device.compute(), 1e-5, operation)
        self._run_some(rank)

    def _run_some(self, rank: int) -> None:
        if not self.stalled:
            self._adversaries[rank].run_some(self.devices[rank])


def traffic(rig: LateSchedulerRig, seed: int, *, turns: int, most: int = 6) -> None:
    """Serve random requests that share prefixes: they decode, are aborted and preempted, and caches are reset.

    Args:
        rig: any.
        seed: of the requests.
        turns: steps in which requests may come; then all are served to their end.
        most: requests at a time.
    """
    dice = random.Random(seed)
    stems = [[dice.randrange(2, 1000) for _ in range(dice.randrange(4 * BLOCK, 10 * BLOCK))] for _ in range(3)]
    alive: list[str] = []
    for turn in range(turns):
        action = dice.random()
        if action < 0.5 and len(rig.scheduler.requests) < most:
            stem = dice.choice(stems)
            tail = [dice.randrange(2, 1000) for _ in range(dice.randrange(1, 2 * BLOCK))]
            alive.append(f"r{turn}")
            rig.add(
                alive[-1],
                stem[: dice.randrange(BLOCK, len(stem) + 1)] + tail,
                max_tokens=dice.choice([1, 2, 4 * BLOCK]),
            )
        elif action < 0.65 and alive:
            rig.abort(alive.pop(dice.randrange(len(alive))))
        elif action < 0.67:
            rig.scheduler.reset_prefix_cache(reset_connector=True)
        rig.forget_cached()
        rig.step()
    rig.run()
