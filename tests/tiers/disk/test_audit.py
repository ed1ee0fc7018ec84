from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerstream.tiers.base import StoreSite
from layerstream.tiers.disk.audit import audit, list_folder
from layerstream.tiers.disk.folder import DiskFolder
from layerstream.tiers.disk.tier import DiskTier
from layerstream.tiers.objects import ObjectFormat
from tests.rigs.disk_engine import DiskEngine
from tests.rigs.tier_items import Room, empty_item, fill, make_batch, make_chain


@pytest.fixture
def engine(tmp_path: Path) -> DiskEngine:
    made = DiskEngine(tmp_path / "kv")
    made.write(make_chain(3))
    return made


def test_whole_objects_say_what_they_are(engine: DiskEngine) -> None:
    chain = make_chain(3)
    os.utime(engine.file(chain[1]), ns=(0, 123456789))
    listing = list_folder(engine.folder)
    done: list[int] = []
    audited = {file.name: file for file in audit(engine.folder, listing.objects, verify=True, progress=done.append)}
    assert done == [nbytes for _, nbytes in listing.objects] == [engine.object_bytes] * 3
    for each in chain:
        file = audited[engine.file(each).name]
        assert (file.state, file.nbytes, file.why) == ("whole", engine.object_bytes, "")
        assert file.header is not None
        assert (file.header.key, file.header.parent, file.header.start) == (
            each.key.hex(),
            each.parent.hex(),
            each.start,
        )
    assert audited[engine.file(chain[1]).name].used_ns == 123456789


def test_a_file_that_vanishes_is_passed_over(engine: DiskEngine) -> None:
    chain = make_chain(3)
    listing = list_folder(engine.folder)
    engine.file(chain[0]).unlink()
    engine.file(chain[1]).unlink()
    engine.file(chain[1]).parent.rmdir()
    (left,) = audit(engine.folder, listing.objects, verify=False, progress=lambda _: None)
    assert left.name == engine.file(chain[2]).name


def test_pages_are_only_read_to_verify_them(engine: DiskEngine) -> None:
    (each, *_) = make_chain(1)
    content = bytearray(engine.file(each).read_bytes())
    content[-1] ^= 1
    engine.file(each).write_bytes(content)
    listing = list_folder(engine.folder)

    def states(*, verify: bool) -> set[str]:
        files = audit(engine.folder, listing.objects, verify=verify, progress=lambda _: None)
        return {file.state for file in files if file.name == engine.file(each).name}

    assert (states(verify=False), states(verify=True)) == ({"whole"}, {"damaged"})


def test_a_header_that_claims_more_than_there_is_costs_no_memory(engine: DiskEngine) -> None:
    (each, *_) = make_chain(1)
    engine.file(each).write_bytes((1 << 62).to_bytes(8, "little") + bytes(5000))
    listing = list_folder(engine.folder)
    files = list(audit(engine.folder, listing.objects, verify=True, progress=lambda _: None))
    assert sorted(file.state for file in files) == ["damaged", "whole", "whole"]


def test_portable_objects_are_looked_into_and_those_of_another_version_left_alone(tmp_path: Path) -> None:
    form = ObjectFormat(layers=["a", "b"], page_bytes=(64, 96), chunk_blocks=64, block_tokens=1, rank=2, heads=(2, 3))
    room, folder = Room(1 << 20), tmp_path / "portable"
    store = DiskTier.parse({"path": str(folder), "gib": 1}).open_store(StoreSite(format=form, memory=(room.memory,)))
    whole, other = make_chain(2, chunk_blocks=64)
    assert store.write(make_batch(fill(form, empty_item(form, each, room)) for each in (whole, other))) == 2
    files = {each: folder / "v1" / each.key.hex()[:2] / f"{each.key.hex()}.2.safetensors" for each in (whole, other)}
    files[other].write_bytes(files[other].read_bytes().replace(b'"canonical":"1"', b'"canonical":"9"'))
    listing = list_folder(DiskFolder(folder))
    found = audit(DiskFolder(folder), listing.objects, verify=True, progress=lambda _: None)
    audited = {file.name: file for file in found}
    assert audited[files[whole].name].state == "whole" and audited[files[other].name].state == "other version"
    header = audited[files[whole].name].header
    assert header is not None and (header.tokens, header.heads, header.rank) == (64, (2, 3), 2)
