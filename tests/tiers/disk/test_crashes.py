from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layerstream.errors import ObjectError
from layerstream.jobs import TierObject
from layerstream.tiers.disk.folder import SHARDS, parse_name
from layerstream.tiers.objects import parse_header
from tests.rigs import disk_writer
from tests.rigs.disk_writer import FORMAT, OBJECT_BYTES, OBJECTS, Writer

SCRIPT = Path(disk_writer.__file__)


def start(mode: str, folder: Path, *numbers: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), mode, str(folder), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def results_of(*processes: subprocess.Popen[str]) -> list[dict[str, int]]:
    printed = [process.communicate(timeout=100)[0] for process in processes]
    assert not any(process.returncode for process in processes)
    return [json.loads(each) for each in printed]


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "v1").rglob("*") if path.is_file()]


def test_a_writer_killed_fifty_times_leaves_whole_objects_and_after_the_next_start_nothing_else(tmp_path: Path) -> None:
    folder, cap = tmp_path / "kv", 24 * OBJECT_BYTES
    (result,) = results_of(start("die", folder, cap, 50))
    assert result["amid_write"] > 5
    writer = Writer(folder, cap)
    usage = writer.index.usage()
    remaining = files_in(folder)
    assert usage is not None and 1 <= usage.objects == len(remaining)
    assert usage.used_bytes == usage.objects * OBJECT_BYTES <= cap
    for path in remaining:
        assert parse_name(path.name) is not None
        said = parse_header(path.read_bytes())
        each = TierObject(key=bytes.fromhex(said.key), parent=b"", start=said.start, blocks=said.blocks)
        assert path.name.startswith(said.key) and writer.read(each)


def test_two_processes_write_and_evict_in_one_folder(tmp_path: Path) -> None:
    folder, cap = tmp_path / "kv", (OBJECTS // 2) * OBJECT_BYTES
    for count in results_of(*[start("share", folder, cap, 400, seed) for seed in (1, 2)]):
        assert count["written"] > OBJECTS and count["found"] >= count["read"] > 0
    sizes = [path.stat().st_size for path in files_in(folder)]
    # Neither knows what the other is writing just then.
    assert set(sizes) == {OBJECT_BYTES} and cap - OBJECT_BYTES <= sum(sizes) <= cap + OBJECT_BYTES
    assert len({path.parent.name for path in files_in(folder)} & set(SHARDS)) > 10


def test_the_rig_notices_wrong_bytes(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "kv", 4 * OBJECT_BYTES)
    each = disk_writer.named(0)
    assert writer.write(each) and writer.read(each)
    (path,) = files_in(tmp_path / "kv")
    content = np.fromfile(path, dtype=np.uint8)
    content[FORMAT.header_bytes + 7] ^= 1
    path.write_bytes(content.tobytes())
    with pytest.raises(ObjectError, match="damaged"):
        writer.read(each)
