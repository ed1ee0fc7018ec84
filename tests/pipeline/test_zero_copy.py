"""What is the zero-copy path's own: how launches are cut where a kernel crosses the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from layerstream.assembly import storage_bytes
from layerstream.jobs import JobKind, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.pipeline.zero_copy import ZeroCopyPath
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import LAYERS, job, make_rig


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def test_no_launch_is_longer_than_its_limit(api: FakeCuda) -> None:
    rig = make_rig(api, path="zero_copy")
    sizes: list[tuple[int, dict[str, object]]] = []
    path = rig.path
    right = rig.path._kernels.scatter_pages  # type: ignore[attr-defined]

    def spy(dst: torch.Tensor, src: torch.Tensor, layer: object, blocks: torch.Tensor, **options: object) -> None:
        sizes.append((blocks.numel(), options))
        right(dst, src, layer, blocks, **options)

    path._kernels = path._kernels._replace(scatter_pages=spy)  # type: ignore[attr-defined]
    with mock.patch("layerstream.kernels.operands.HOST_LAUNCH_BYTES", 3 * 64):
        rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, list(range(8)), list(range(8))),)))
        rig.engine.start_loads(layerwise=False)
    rig.engine.end_step()
    api.run()
    # The rig names every pool page as a run of its own, so a launch moves one page; a run of eight is cut in three.
    assert {blocks for blocks, _ in sizes} == {1}
    assert all(options == {"packed_on_host": True} for _, options in sizes)
    assert len(sizes) == 8 * LAYERS
    sizes.clear()
    with mock.patch("layerstream.kernels.operands.HOST_LAUNCH_BYTES", 3 * 64):
        rig.engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, list(range(8)), [(0, 8)]),)))
        rig.engine.start_loads(layerwise=False)
    rig.engine.end_step()
    api.run()
    assert [blocks for blocks, _ in sizes] == [3, 3, 2] * LAYERS


def test_launches_say_that_they_cross_the_link_and_keep_their_limit(api: FakeCuda) -> None:
    told: list[tuple[str, dict[str, object]]] = []

    def telling(name: str) -> Callable[..., None]:
        def kernel(*args: Any, **options: object) -> None:
            told.append((name, options))

        return api.kernel(kernel)

    rig = make_rig(api, path="zero_copy")
    engine = rig.engine
    path = ZeroCopyPath(
        device=engine.device,
        cache=PagedCache(engine.geometry, [storage_bytes(tensor) for tensor in rig.kv]),
        pool=engine.pool,
        kernels=PageKernels(*map(telling, PageKernels._fields)),
        max_ctas=3,
    )
    engine._paths = PathChoice(loads=[(0, path)], save=path)
    jobs = (job(1, JobKind.LOAD, [1], [5]), job(2, JobKind.SAVE, [2], [6]))
    engine.begin_step(StepPlan(step=1, jobs=jobs))
    engine.start_loads(layerwise=False)
    engine.end_step()
    api.run()
    assert sorted(name for name, _ in told) == ["gather_pages"] * LAYERS + ["scatter_pages"] * LAYERS
    assert all(options == {"packed_on_host": True, "max_ctas": 3} for _, options in told)
