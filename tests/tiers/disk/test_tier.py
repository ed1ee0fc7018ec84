from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from layerstream.errors import ConfigError
from layerstream.tiers.base import StoreSite
from layerstream.tiers.disk.tier import GIB, DiskTier
from layerstream.tiers.registry import parse_tiers
from tests.rigs.disk_engine import DiskEngine
from tests.rigs.tier_items import make_chain, make_format, make_site, page_bytes_of

FORMAT = make_format((4096, 8192))
OBJECT = FORMAT.nbytes(FORMAT.chunk_blocks)


def test_the_option_tiers_makes_one() -> None:
    (spec,) = parse_tiers([{"type": "disk", "path": "/somewhere", "gib": 50}])
    assert isinstance(spec.tier, DiskTier)
    assert (spec.tier.kind, spec.tier.medium, spec.tier.tails) == ("disk", "DISK", True)
    assert (spec.tier.options.fsync, spec.tier.options.direct) == ("never", True)
    assert str(spec.tier) == "disk at /somewhere, at most 50 GiB"
    assert not Path("/somewhere").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "relative/folder"}, "'path' got 'relative/folder'; allowed: the absolute path"),
        ({"path": ""}, "'path' got ''"),
        ({"path": "/a\0b"}, "in printable characters"),
        ({"path": 7}, "path"),
        ({"path": None}, "path"),
        ({"gib": 0}, "gib"),
        ({"gib": -1.0}, "gib"),
        ({"gib": float("nan")}, "gib"),
        ({"gib": float("inf")}, "gib"),
        ({"gib": True}, "gib"),
        ({"gib": "50"}, "gib"),
        ({"fsync": "always"}, "fsync"),
        ({"direct": "yes"}, "direct"),
        ({"size": 5}, "'size' is unknown"),
    ],
)
def test_options_that_cannot_be_used_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        DiskTier.parse({"path": "/somewhere", "gib": 1, **changes})


@pytest.mark.parametrize("lacking", ["path", "gib"])
def test_what_is_required_is_asked_for(lacking: str) -> None:
    options = {"path": "/somewhere", "gib": 1}
    del options[lacking]
    with pytest.raises(ConfigError, match=lacking):
        DiskTier.parse(options)


def test_a_cap_below_one_chunk_is_refused_with_the_size_it_needs(tmp_path: Path) -> None:
    site = make_site([FORMAT, make_format((4096, 8192), rank=1)])
    tier = DiskTier.parse({"path": str(tmp_path / "kv"), "gib": (2 * OBJECT - 1) / GIB})
    with pytest.raises(ConfigError, match=f"one chunk of all ranks takes {2 * OBJECT} bytes: use ") as refused:
        tier.open_index(site)
    named = float(str(refused.value).partition("bytes: use ")[2].split()[0])
    DiskTier.parse({"path": str(tmp_path / "kv"), "gib": named}).open_index(site)


def test_what_it_writes_is_private_and_readable_with_any_safetensors_tool(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "made" / "kv")
    (each,) = make_chain(1)
    assert engine.write([each]) == 1
    path = engine.file(each)
    tensors = load_file(path)
    assert list(tensors) == list(engine.formats[0].layers)
    for tensor, pages in zip(tensors.values(), page_bytes_of(engine.formats[0], each), strict=True):
        assert np.array_equal(tensor.reshape(-1), pages)
    modes = [stat.S_IMODE(part.stat().st_mode) for part in (path, path.parent, path.parents[1], path.parents[2])]
    assert modes == [0o600, 0o700, 0o700, 0o700]
    assert [part.name for part in (tmp_path / "made" / "kv").iterdir()] == ["v1"]


def test_every_end_looks_at_the_folder_before_the_engine_serves(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    tier = DiskTier.parse({"path": str(folder), "gib": 1})
    with pytest.raises(ConfigError, match="world-writable"):
        tier.open_index(make_site([FORMAT]))
    with pytest.raises(ConfigError, match="world-writable"):
        tier.open_store(StoreSite(format=FORMAT, memory=()))


def test_it_says_where_its_files_are(tmp_path: Path) -> None:
    assert DiskTier.parse({"path": str(tmp_path / "kv"), "gib": 1.0}).folder == tmp_path / "kv"
