"""The second runner's order of a step with a drafter, by the installed vLLM's own driver.

The drafter runs while the plan is still bound, so its layers' hooks run too; reports are taken before it or behind it,
depending on the version, and the step ends behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.outputs import KVConnectorOutput

from tests.hooks.vllm.test_call_orders import OPTIONS, SecondRunnerRig
from tests.rigs.scheduler_rig import BLOCK


class DraftingDriver:
    """vLLM's driver as its runner uses it with a drafter, whose layers are the model's last one and one of its own."""

    def __init__(self, rig: DrafterRig, driver: Any) -> None:
        self._rig, self._driver = rig, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def post_forward(self, finished: set[str]) -> KVConnectorOutput | None:
        if not hasattr(self._driver, "finalize_step"):
            self._draft()
            output: KVConnectorOutput | None = self._driver.post_forward(finished)
            return output
        output = self._driver.post_forward(finished, defer_finalize=True)
        self._draft()
        self._driver.finalize_step()
        return output

    def _draft(self) -> None:
        worker = self._rig.workers[0]
        assert worker.has_connector_metadata()
        for layer in (self._rig.layers[-1], "the drafter's own layer") * 2:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, self._rig.kv[0][self._rig.layers[-1]], None)
        self._rig.drafted += 1


class DrafterRig(SecondRunnerRig):
    drafted = 0

    def attach(self) -> None:
        super().attach()
        self.driver = DraftingDriver(self, self.driver)
        # As with a speculative_config, whose drafter the rig's scheduler does not have.
        self.workers[0].worker._hooks_tell_layers = False


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DrafterRig]:
    rig = DrafterRig(tmp_path, options=OPTIONS)
    rig.attach()
    yield rig
    rig.close()
    kv_transfer_state._KV_CONNECTOR_AGENT = None


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE])
def test_blocks_are_saved_and_loaded_right_around_a_drafter(rig: DrafterRig, mode: CUDAGraphMode) -> None:
    rig.mode = mode
    ids = [2 + i * 37 % 900 for i in range(20 * BLOCK)]
    rig.serve("cold", ids, max_tokens=3)
    assert rig.drafted >= 3
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", ids, max_tokens=3) == 19 * BLOCK
    assert rig.outputs["warm"] == rig.outputs["cold"]
    assert not rig.workers[0].has_connector_metadata()
