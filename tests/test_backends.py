"""What a device gets: streams, pinning and kernels."""

from __future__ import annotations

import pytest
import torch

from layerstream.backends import open_device
from layerstream.streams import cuda, pinning


@pytest.mark.parametrize(("place", "index"), [("cuda:3", 3), ("cuda", 0)])
def test_streams_and_pinning_are_of_the_same_gpu(place: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaDevice", lambda number: ("streams", number))
    monkeypatch.setattr(pinning, "CudaPinner", lambda *, device: ("pinning", device))
    parts: tuple[object, ...] = open_device(torch.device(place))
    assert parts[:2] == (("streams", index), ("pinning", index))
