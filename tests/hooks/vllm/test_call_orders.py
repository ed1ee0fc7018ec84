"""The order of calls of vLLM's second model runner, by its own connector driver: FULL and PIECEWISE steps, and none.

The driver is plain Python, so the GPU runner's order of calls is covered without a GPU. In a FULL step no hook runs and
the forward context is a dummy; every byte must be in place when the driver returns from `pre_forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import get_kv_connector

from tests.rigs.scheduler_rig import BLOCK, LAYERS, SchedulerRig

OPTIONS = {"host_gib": 0.002, "chunk_tokens": 4 * BLOCK, "staging_mib": 1}


class SecondRunnerRig(SchedulerRig):
    """The rig with the second runner's driver. `mode` decides how steps with tokens run."""

    mode = CUDAGraphMode.PIECEWISE

    def attach(self) -> None:
        """Let the driver have the first rank's worker half."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.workers[0]
        self.workers[0].worker.close()
        self.driver = get_kv_connector(self.config, self.kv[0])

    def _forward(self, rank: int, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        if not names:
            return self.driver.no_forward(output)
        batch: Any = SimpleNamespace(
            idx_mapping=torch.arange(len(names)), req_ids=names, num_tokens=output.total_num_scheduled_tokens
        )
        full = self.mode is CUDAGraphMode.FULL
        with ExitStack() as stack:
            if full:
                self.driver.pre_forward(output, batch, attn_metadata={name: object() for name in self.layers})
            else:
                stack.enter_context(
                    set_forward_context(
                        {name: object() for name in self.layers},
                        self.config,
                        num_tokens=batch.num_tokens,
                        cudagraph_runtime_mode=self.mode,
                        batch_descriptor=BatchDescriptor(num_tokens=batch.num_tokens),
                    )
                )
                self.driver.pre_forward(output, batch)
            for index, layer in enumerate(self.layers):
                for name in names:
                    self._write(self.kv[0][layer], index, name, output.num_scheduled_tokens[name])
                if not full:
                    self.workers[0].wait_for_layer_load(layer)
                for name in names:
                    self._check(self.kv[0][layer], index, name, output.num_scheduled_tokens[name])
                if not full:
                    self.workers[0].save_kv_layer(layer, self.kv[0][layer], None)
            self.driver.finish_forward()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sample(name, output.num_scheduled_tokens[name]) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.driver.post_forward(output.finished_req_ids),
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SecondRunnerRig]:
    rig = SecondRunnerRig(tmp_path, options=OPTIONS)
    rig.attach()
    yield rig
    rig.close()
    kv_transfer_state._KV_CONNECTOR_AGENT = None


@pytest.mark.parametrize("cold", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE])
@pytest.mark.parametrize("warm", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE])
@pytest.mark.parametrize(
    "tokens", [4 * BLOCK + 1, 10 * BLOCK + 9, 20 * BLOCK], ids=["one token left", "tail", "chunks"]
)
def test_bytes_are_in_place_in_every_mode(
    rig: SecondRunnerRig, cold: CUDAGraphMode, warm: CUDAGraphMode, tokens: int
) -> None:
    ids = [2 + i * 37 % 900 for i in range(tokens)]
    rig.mode = cold
    rig.serve("cold", ids, max_tokens=3)
    assert rig.scheduler.reset_prefix_cache()
    rig.mode = warm
    assert rig.serve("warm", ids, max_tokens=3) == (tokens - 1) // BLOCK * BLOCK
    assert rig.outputs["warm"] == rig.outputs["cold"]


def test_modes_may_change_from_step_to_step(rig: SecondRunnerRig) -> None:
    ids = [2 + i * 37 % 900 for i in range(200)]
    modes = [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL, CUDAGraphMode.NONE]
    for turn in range(8):
        rig.mode = modes[turn % 4]
        rig.add(f"r{turn}", ids + [3 + turn] * (turn * 5), max_tokens=4)
        for step in range(6):
            rig.mode = modes[(turn + step) % 4]
            rig.step()
        rig.run()
        assert rig.scheduler.reset_prefix_cache()
    assert all(rig.hits[f"r{turn}"] >= 12 * BLOCK for turn in range(1, 8))


def test_a_disabled_driver_leaves_nothing_behind(rig: SecondRunnerRig) -> None:
    """Warm-up and graph capture run with the connector disabled, between real steps too."""
    rig.serve("before", range(2, 100))
    rig.driver.set_disabled(True)
    assert rig.driver.post_forward(set()) is None
    rig.driver.set_disabled(False)
    rig.driver.reset_capture_state()
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("after", range(2, 100)) == 6 * BLOCK


def test_hooks_without_metadata_do_nothing(rig: SecondRunnerRig) -> None:
    worker = rig.workers[0]
    for _ in range(2):
        for layer in [*rig.layers, "a layer nobody registered"]:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, torch.empty(0), None)
        worker.wait_for_save()
    assert worker.build_connector_worker_meta() is None
    assert len(rig.layers) == LAYERS


@pytest.mark.parametrize(
    ("mode", "layerwise"),
    [(CUDAGraphMode.PIECEWISE, True), (CUDAGraphMode.NONE, True), (CUDAGraphMode.FULL, False)],
)
def test_loads_are_gated_layer_by_layer_exactly_where_hooks_run(
    rig: SecondRunnerRig, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, layerwise: bool
) -> None:
    rig.serve("cold", range(2, 100))
    assert rig.scheduler.reset_prefix_cache()
    engine = rig.workers[0].worker.engine
    assert engine is not None
    asked: list[bool] = []
    start_loads = engine.start_loads

    def spy(*, layerwise: bool, in_graph: bool = False) -> None:
        if engine._gated is not None:
            asked.append(layerwise)
        start_loads(layerwise=layerwise, in_graph=in_graph)

    monkeypatch.setattr(engine, "start_loads", spy)
    rig.mode = mode
    assert rig.serve("warm", range(2, 100)) == 6 * BLOCK
    assert asked == [layerwise]
