from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from layerstream.kernels import gather, reference, scatter, segments


@dataclass(frozen=True)
class Copies:
    gather: Callable[..., None]
    scatter: Callable[..., None]
    gather_layers: Callable[..., None]
    scatter_layers: Callable[..., None]
    refuses_large_ids: bool

    @classmethod
    def of(cls, gathering: Any, scattering: Any, *, refuses_large_ids: bool) -> Copies:
        return cls(
            gathering.gather_pages,
            scattering.scatter_pages,
            gathering.gather_layers,
            scattering.scatter_layers,
            refuses_large_ids,
        )


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Copies]:
    """The Triton kernels run by Triton's interpreter, on CPU tensors.

    TRITON_INTERPRET is read when a kernel is defined and would hold for the whole process; wrapping the kernels by hand
    leaves those that other tests compile alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        locate = InterpretedFunction(segments.locate.fn)
        for module, name in ((gather, "gather_kernel"), (scatter, "scatter_kernel")):
            patch.setattr(module, name, InterpretedFunction(getattr(module, name).fn))
            patch.setattr(module, "locate", locate)
        # The interpreter works on CPU tensors in place; copying each back onto itself would touch all of a sparse one.
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        yield Copies.of(gather, scatter, refuses_large_ids=False)


@pytest.fixture(scope="module", params=["triton", "reference"])
def copies(request: pytest.FixtureRequest) -> Copies:
    """Both implementations."""
    if request.param == "triton":
        interpreted: Copies = request.getfixturevalue("interpreted")
        return interpreted
    return Copies.of(reference, reference, refuses_large_ids=True)
