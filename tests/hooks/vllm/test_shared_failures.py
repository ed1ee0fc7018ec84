"""Two equal prompts in one batch, and the load of the blocks that they share fails: policy `recompute`, under which the
second one may take the blocks up before the first has computed them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.example_rig import ExampleRig
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

IDS = prompt(6 * BLOCK + 5)
SHARES = ("the first is computed piece by piece", "the first goes away")


def serve_twice(rig: SchedulerRig, fail_next_load: Callable[[], object], how: str) -> None:
    """Serve the prompt, forget it on the GPU, and serve it twice at once while its load fails."""
    rig.scheduler.recompute_kv_load_failures = True
    rig.serve("cold", IDS)
    assert rig.scheduler.reset_prefix_cache()
    fail_next_load()
    if how == "the first is computed piece by piece":
        rig.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    rig.add("first", IDS, max_tokens=4)
    rig.add("second", IDS, max_tokens=4)
    rig.step()
    if how == "the first goes away":
        rig.abort("first")
    rig.run()
    assert rig.requests["second"].num_output_tokens == 4


@pytest.mark.parametrize("how", SHARES)
def test_whoever_shares_a_load_that_failed_reads_right_bytes(make_rig: Callable[..., SchedulerRig], how: str) -> None:
    rig = make_rig(options={"load_mode": "parked"})
    failures: list[None] = []

    def fail_next_load() -> None:
        engine = rig.workers[0].worker.engine
        assert engine is not None
        path: Any = engine._paths.load(6)

        def broken(*_: Any, **__: Any) -> None:
            failures.append(None)
            raise OSError("planted")

        path._kernels = path._kernels._replace(scatter_pages=broken, scatter_layers=broken)

    serve_twice(rig, fail_next_load, how)
    assert failures


@pytest.mark.parametrize("how", SHARES)
def test_the_same_with_vllms_example_connector_reads_wrong_bytes(tmp_path: Path, how: str) -> None:
    rig = ExampleRig(tmp_path)
    serve_twice(rig, lambda: rig.fail_next_load(1), how)
    assert rig.wrong
    assert all(error.startswith("request second, ") for error in rig.wrong)
    rig.close()
