"""Tiers of a test under names that the option `tiers` may use, and a model that tiers can tell from others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from layerstream.tiers.base import Tier


@contextmanager
def installed(tiers: Mapping[str, Tier]) -> Iterator[None]:
    """Within, `{"type": NAME}` in the option `tiers` means the tier of this name, in every half of every engine."""

    class Named:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def parse(self, options: dict[str, Any]) -> Tier:
            assert not options
            return tiers[self.kind]

    # However busy the machine is, a lookup of these tests is not late.
    with (
        mock.patch("layerstream.tiers.registry._tier_class", Named),
        mock.patch("layerstream.tiers.registry.LOOKUP_MS", 20_000.0),
    ):
        yield


def write_weights(folder: Path, content: bytes = b"abcd") -> None:
    """Give the model in `folder` weights: one tensor of these bytes."""
    entry = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    header = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
