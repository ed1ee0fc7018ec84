from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fuzz_rig import FuzzRig
from tests.rigs.fuzz_setup import Setup
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig

OPTIONS = {"host_gib": 0.002, "chunk_tokens": 4 * BLOCK, "staging_mib": 1}


@pytest.fixture(autouse=True)
def rates_are_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test learns of this machine is not there for others."""
    monkeypatch.setattr("layerstream.hooks.vllm.scheduler.cache_dir", lambda: tmp_path / "cache")


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., SchedulerRig]]:
    """Makes engines of one model; see `SchedulerRig`."""
    with ExitStack() as stack:

        def make(kind: type[SchedulerRig] = SchedulerRig, **arguments: Any) -> SchedulerRig:
            rig = kind(tmp_path, options={**OPTIONS, **arguments.pop("options", {})}, **arguments)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def make_stepping_rig(tmp_path: Path) -> Iterator[Callable[..., FuzzRig]]:
    """Makes engines with drafts and steps in flight; see `FuzzRig`. Arguments are fields of `Setup`."""
    with ExitStack() as stack:

        def make(**setup: Any) -> FuzzRig:
            rig = FuzzRig(tmp_path, Setup(**setup))
            stack.callback(rig.close)
            return rig

        yield make
