"""How long steps take, by counting: the real engine on the virtual device, whose costs make every number exact.

Loading a layer takes 10 ms on the copy engine and one scatter; computing it takes 10 ms.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.backends import open_path
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, Report, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.streams.accesses import page_accesses
from layerstream.streams.base import Event
from layerstream.streams.costs import Costs
from layerstream.streams.virtual import VirtualDevice
from layerstream.timeline import read_timeline
from tests.rigs.virtual_rig import KERNELS

MS = 1e-3
LAYERS, BLOCKS, PAGE_BYTES = 8, 10, 64
LAYER_BYTES = BLOCKS * PAGE_BYTES
LOAD = COMPUTE = 10 * MS
SCATTER = 0.1 * MS
FREE_HOST = Costs(
    copy_bytes_per_s=LAYER_BYTES / LOAD,
    copy_latency_s=0.0,
    row_s=0.0,
    kernel_bytes_per_s=1e18,
    kernel_latency_s=SCATTER,
    launch_s=0.0,
    event_s=0.0,
)
SLOW_HOST = replace(FREE_HOST, launch_s=1 * MS)
FIRST = LOAD + SCATTER
"""When the first layer's bytes are there."""


class Times(NamedTuple):
    """Of one step, in seconds since the rig was made."""

    started: list[float]
    """Per layer: its compute begins."""
    ended: float
    submitted: float
    """The host had queued the loads."""
    report: Report


class Rig:
    def __init__(
        self, costs: Costs, *, path: str = "staged", group: int = 1, trace_dir: Path | None = None, pieces: int = 8
    ) -> None:
        self.kv = [torch.full((BLOCKS, PAGE_BYTES), 1, dtype=torch.uint8) for _ in range(LAYERS)]
        geometry = kv_geometry(
            {f"layer.{index}": tensor for index, tensor in enumerate(self.kv)}, num_blocks=BLOCKS, block_tokens=16
        )
        self.device = VirtualDevice(costs, accesses=page_accesses(*KERNELS))
        for tensor in self.kv:
            self.device.place(tensor)
        pool = HostPool(page_bytes=[PAGE_BYTES] * LAYERS, chunk_blocks=BLOCKS, budget_bytes=1 << 16)
        for layer in range(LAYERS):
            pool.span(layer, 0, BLOCKS).fill_(100 + layer)
        # A piece holds all blocks of up to four layers.
        with mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 4 * LAYER_BYTES):
            only = open_path(
                path,
                device=self.device,
                cache=PagedCache(geometry, [storage_bytes(tensor) for tensor in self.kv]),
                pool=pool,
                kernels=KERNELS,
                staging_bytes=2 * pieces * 4 * LAYER_BYTES,
            )
        self.engine = StreamEngine(
            device=self.device,
            geometry=geometry,
            pool=pool,
            paths=PathChoice(loads=[(0, only)], save=only),
            layers_per_gate=group,
            trace_dir=trace_dir,
        )
        for layer in range(LAYERS):
            self.engine.wait_layer(layer)

    def compute(self, seconds: float) -> None:
        self.device.work(self.device.compute(), seconds)

    def mark(self) -> Event:
        event = self.device.event()
        self.device.compute().record(event)
        return event

    def load(self, *, layerwise: bool = True) -> Times:
        """One step that loads all blocks and computes all layers."""
        engine = self.engine
        job = Job(
            job_id=1,
            kind=JobKind.LOAD,
            request_id="r",
            block_ids=tuple(range(BLOCKS)),
            pool_runs=((0, BLOCKS),),
        )
        engine.begin_step(StepPlan(step=1, jobs=(job,)))
        engine.start_loads(layerwise=layerwise)
        submitted = self.device.host_clock
        started = []
        for layer in range(LAYERS):
            if layerwise:
                engine.wait_layer(layer)
            started.append(self.mark())
            self.compute(COMPUTE)
        engine.end_step()
        ended = self.mark()
        self.device.run()
        for layer, tensor in enumerate(self.kv):
            assert set(tensor.flatten().tolist()) == {100 + layer}
        report = engine.poll()
        assert report is not None
        times = [self.device.reached_at(event) for event in (*started, ended)]
        return Times(times[:-1], times[-1], submitted, report)


def test_a_step_takes_one_load_more_than_its_compute() -> None:
    times = Rig(FREE_HOST).load()
    assert times.started == pytest.approx([FIRST + COMPUTE * layer for layer in range(LAYERS)])
    assert times.ended == pytest.approx(FIRST + LAYERS * COMPUTE), "about 90 ms and not 160"


def test_a_full_step_waits_for_the_whole_load() -> None:
    times = Rig(FREE_HOST).load(layerwise=False)
    assert times.started[0] == pytest.approx(LAYERS * LOAD + SCATTER)
    assert times.ended == pytest.approx(LAYERS * (LOAD + COMPUTE) + SCATTER), "about 160 ms"


@pytest.mark.parametrize(("ahead", "first"), [(LAYERS, 18 * MS), (4, 2 * MS + FIRST), (1, 2 * MS + FIRST)])
def test_what_the_host_takes_to_submit_shows_only_as_far_as_it_goes_before_the_first_layer(
    monkeypatch: pytest.MonkeyPatch, ahead: int, first: float
) -> None:
    """A launch takes the host 1 ms: the table's upload, copy and scatter of each layer, the model's own first launch.
    Queued before all else, the layers lose 7.9 ms; a few ahead, only the table and the first copy (2 ms) are lost."""
    monkeypatch.setattr("layerstream.engine.GROUPS_AHEAD", ahead)
    times = Rig(SLOW_HOST).load()
    assert times.submitted == pytest.approx((1 + 2 * ahead) * MS)
    assert times.ended == pytest.approx(first + LAYERS * COMPUTE)


def test_grouped_layers_cost_fewer_submissions_and_a_later_start() -> None:
    one, four = (Rig(SLOW_HOST, group=group).load() for group in (1, 4))
    assert (one.submitted, four.submitted) == pytest.approx((9 * MS, 5 * MS))
    assert four.started[0] > one.started[0]
    four = Rig(FREE_HOST, group=4).load()
    assert four.started[0] == pytest.approx(4 * LOAD + SCATTER)
    assert four.ended == pytest.approx(4 * LOAD + SCATTER + LAYERS * COMPUTE), "nothing else is lost"


@pytest.mark.parametrize(("path", "stall"), [("staged", SCATTER), ("batch_dma", LOAD)])
def test_copies_into_the_ring_run_ahead_while_an_earlier_step_computes(path: str, stall: float) -> None:
    """Copies that write the KV cache themselves cannot."""
    rig = Rig(FREE_HOST, path=path)
    rig.compute(2 * LOAD)
    times = rig.load()
    assert times.started[0] == pytest.approx(2 * LOAD + stall)
    assert times.ended == pytest.approx(2 * LOAD + stall + LAYERS * COMPUTE)
    assert times.report.stats.stall_seconds == pytest.approx(stall)


def test_copies_run_ahead_as_far_as_the_ring_reaches() -> None:
    """Three loads fit into the time of the earlier step, and two pieces into the ring."""
    started = {}
    for pieces in (2, 8):
        rig = Rig(replace(FREE_HOST, copy_bytes_per_s=LAYER_BYTES / (2 * LOAD)), pieces=pieces)
        rig.compute(6 * LOAD)
        started[pieces] = rig.load().started
    ahead = 6 * LOAD + SCATTER
    assert started[8][3] - ahead == pytest.approx(3 * COMPUTE)
    assert started[2][:2] == pytest.approx([ahead, ahead + COMPUTE])
    assert started[2][2] == pytest.approx(ahead + 2 * LOAD + SCATTER), "its copy had to wait for the first scatter"


def test_a_parked_load_stalls_no_decode() -> None:
    rig = Rig(FREE_HOST)
    job = Job(
        job_id=7, kind=JobKind.PARKED_LOAD, request_id="p", block_ids=tuple(range(BLOCKS)), pool_runs=((0, BLOCKS),)
    )
    ends = []
    for step in range(12):
        rig.engine.begin_step(StepPlan(step=step, jobs=(job,)) if step == 0 else None)
        for layer in range(LAYERS):
            rig.engine.wait_layer(layer)
            rig.compute(COMPUTE / LAYERS)
        rig.engine.start_loads(layerwise=True)
        rig.engine.end_step()
        ends.append(rig.mark())
    rig.device.run(until=LAYERS * LOAD)
    assert rig.engine.poll() is None, "its last scatter comes after that"
    rig.device.run()
    assert [rig.device.reached_at(end) for end in ends] == pytest.approx([(step + 1) * COMPUTE for step in range(12)])
    report = rig.engine.poll()
    assert report is not None
    assert report.done == {7: 1}
    assert report.stats.load_seconds == pytest.approx(LAYERS * LOAD + SCATTER)
    assert (report.stats.gated_load_seconds, report.stats.stall_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("slower", [1, 2], ids=["as fast as compute", "half as fast"])
def test_the_overlap_ratio_that_is_reported_is_that_of_the_timeline(tmp_path: Path, slower: int) -> None:
    load = LOAD * slower
    costs = replace(FREE_HOST, copy_bytes_per_s=LAYER_BYTES / load)
    times = Rig(costs, trace_dir=tmp_path).load()
    (file,) = tmp_path.iterdir()
    timeline = read_timeline(file)
    assert [layer.gate_end for layer in timeline.layers] == pytest.approx(times.started)
    stats = times.report.stats
    # The step would take no longer than its compute if nothing stalled.
    stall = times.ended - LAYERS * COMPUTE
    assert stats.stall_seconds == pytest.approx(stall)
    assert stall == pytest.approx(load + SCATTER + (LAYERS - 1) * (load - COMPUTE))
    assert stats.gated_load_seconds == pytest.approx(LAYERS * load + SCATTER)
    assert stats.overlap_ratio == pytest.approx(1 - stall / (LAYERS * load + SCATTER))
    assert timeline.overlap_ratio == pytest.approx(stats.overlap_ratio)
