from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from layerstream.cli import app
from layerstream.cli.inspection import SHORT
from layerstream.jobs import TierObject
from layerstream.tiers.disk.folder import DiskFolder, open_shard
from layerstream.tiers.disk.unfinished import create_unfinished
from tests.rigs.disk_engine import SECOND, DiskEngine
from tests.rigs.tier_items import NAMESPACE, make_chain

OTHER = b"\7" * 32
DAY = 86400


@pytest.fixture(autouse=True)
def common_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Run the command on the folder; its exit status, and what it said with single spaces."""

    def run(*arguments: str, path: Path = tmp_path / "kv") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["layerstream", "inspect", str(path), *arguments])
        with pytest.raises(SystemExit) as stop:
            app.main()
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, " ".join((printed.out + printed.err).split())

    return run


Inspect = Callable[..., tuple[int, str]]


@pytest.fixture
def engine(tmp_path: Path) -> DiskEngine:
    made = DiskEngine(tmp_path / "kv", ranks=2)
    chain = make_chain(3, tail=2)
    for rank in range(2):
        made.write(chain, rank)
    return made


def other_engine(tmp_path: Path) -> tuple[DiskEngine, list[TierObject]]:
    made = DiskEngine(tmp_path / "kv", page_bytes=(512,), namespace=OTHER)
    chain = make_chain(2, namespace=OTHER)
    made.write(chain)
    return made, chain


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def row(said: str, namespace: bytes) -> list[str]:
    match = re.search(rf"{namespace.hex()[:SHORT]} ((?:│[^│]*)+)", said)
    assert match is not None, said
    return [cell.strip() for cell in match[1].split("│")[1:7]]


def test_it_lists_what_is_there(inspect: Inspect, engine: DiskEngine, tmp_path: Path) -> None:
    other_engine(tmp_path)
    for number, path in enumerate(sorted(engine.files())):
        os.utime(path, (0, 1_700_000_000 + number * DAY))
    status, said = inspect()
    assert status == 0
    assert "kv: 6 objects in 10 files, " in said
    nbytes = sum(path.stat().st_size for path in engine.files())
    assert f"{nbytes / 1024:,.2f}".rstrip("0").rstrip(".") + " KiB" in said
    objects, ranks, _, tokens, first, last = row(said, NAMESPACE)
    assert (objects, ranks, tokens) == ("4", "2", "64")
    assert first.startswith("2023-11-") and last.startswith("2023-11-") and first < last
    assert row(said, OTHER)[:2] == ["2", "1"]
    assert "damaged: 0 (only headers were read; --verify reads everything)" in said


def test_an_empty_tier_is_told_as_one(inspect: Inspect, tmp_path: Path) -> None:
    DiskFolder(tmp_path / "kv").prepare()
    status, said = inspect("--verify")
    assert status == 0 and "0 objects in 0 files, 0 bytes" in said and "damaged: 0 " in said


def test_damage_shows_where_it_is_looked_for(inspect: Inspect, engine: DiskEngine) -> None:
    chain = make_chain(3, tail=2)
    assert inspect("--verify")[0] == 0
    flip(engine.file(chain[0]), -1)
    assert inspect()[0] == 0
    status, said = inspect("--verify")
    assert status == 1
    assert "damaged: 1 " in said and f"damaged {engine.file(chain[0]).name}: bytes of layer 'model.layers.1." in said
    os.truncate(engine.file(chain[1]), 5000)
    os.truncate(engine.file(chain[2]), 0)
    flip(engine.file(chain[3]), 1)
    engine.file(chain[0], 1).write_bytes(engine.file(chain[1], 1).read_bytes())
    status, said = inspect()
    assert status == 1 and "damaged: 4 " in said
    assert "it has 5000 bytes instead of" in said and "it has no safetensors header" in said
    assert "it is another object" in said
    assert "damaged: 5 " in inspect("--verify")[1]


def test_what_is_damaged_can_be_pruned(inspect: Inspect, engine: DiskEngine) -> None:
    chain = make_chain(3, tail=2)
    flip(engine.file(chain[0]), -1)
    os.truncate(engine.file(chain[2], 1), 0)
    with engine.folder.objects() as objects, open_shard(objects, "ab", create=True) as shard:
        with create_unfinished(shard, "ab" * 32, 0):
            pass
        with create_unfinished(shard, "ab" * 32, 1) as (living, _):
            status, said = inspect("--prune-damaged")
            assert (engine.path / "v1" / "ab" / living).exists()
    assert status == 0
    assert "unfinished: 2" in said and "removed 2 files, " in said and "removed 1 unfinished files" in said
    assert not engine.file(chain[0]).exists() and not engine.file(chain[2], 1).exists()
    assert len(engine.files()) == 6 + 1
    assert inspect("--verify")[0] == 0


def test_a_namespace_can_be_pruned_by_its_first_digits(inspect: Inspect, engine: DiskEngine, tmp_path: Path) -> None:
    other, chain = other_engine(tmp_path)
    status, said = inspect("--prune-namespace", "0707")
    assert status == 0 and f"removed 2 files, {sum(other.formats[0].nbytes(4) for _ in chain) / 1024:g} KiB" in said
    assert len(engine.files()) == 8 and not any(other.file(each).exists() for each in chain)
    status, said = inspect("--prune-namespace", "0707")
    assert status == 2 and f"0 namespaces begin with '0707', and one must; there are: {NAMESPACE.hex()[:SHORT]}" in said
    assert len(engine.files()) == 8


def test_namespaces_that_the_digits_do_not_tell_apart_stay(
    inspect: Inspect, engine: DiskEngine, tmp_path: Path
) -> None:
    near = bytes([NAMESPACE[0], NAMESPACE[1] ^ 1]) * 16
    other = DiskEngine(tmp_path / "kv", namespace=near)
    other.write(make_chain(1, namespace=near))
    status, said = inspect("--prune-namespace", NAMESPACE.hex()[:2])
    assert status == 2 and "2 namespaces begin with" in said
    assert len(engine.files()) == 9


def test_what_is_old_can_be_pruned(inspect: Inspect, engine: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(3, tail=2)
    monkeypatch.setattr("layerstream.cli.inspection.time.time_ns", lambda: 1_700_000_000 * SECOND)
    for age, each in enumerate(chain):
        for rank in range(2):
            os.utime(engine.file(each, rank), (0, 1_700_000_000 - age * DAY))
    status, said = inspect("--prune-older-than", "1.5")
    assert status == 0 and "removed 4 files, " in said and "not used for 1.5 days" in said
    assert sorted(engine.files()) == sorted(engine.file(each, rank) for each in chain[:2] for rank in range(2))
    assert "removed 2 files" in inspect("--prune-older-than", "0")[1]


def test_everything_can_be_pruned_and_nothing_else_goes(inspect: Inspect, engine: DiskEngine, tmp_path: Path) -> None:
    chain = make_chain(3, tail=2)
    shard = engine.file(chain[0]).parent
    flip(engine.file(chain[1]), -1)
    content = engine.file(chain[2]).read_bytes()
    newer = content.replace(b'"version":"1"', b'"version":"2"')
    assert newer != content
    engine.file(chain[2]).write_bytes(newer)
    foreign = content.replace(b'"format":"layerstream"', b'"format":"pt__________"')
    engine.file(chain[3]).write_bytes(foreign)
    (shard / "notes.txt").write_text("x")
    (engine.path / "readme").write_text("x")
    (engine.path / "v1" / "odd").mkdir()
    (engine.path / "v1" / "odd" / engine.file(chain[0]).name).write_bytes(content)
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / f"{'ee' * 32}.0.safetensors"
    target.write_bytes(content)
    (engine.path / "v1" / "ee").symlink_to(outside)
    (shard / f"{shard.name}{'0' * 62}.7.safetensors").symlink_to(target)
    status, said = inspect("--prune-all")
    assert status == 0 and "removed 6 files, " in said
    assert "left alone: 1 of another format version, 6 not from layerstream" in said
    left = {
        engine.file(chain[2]).name,
        engine.file(chain[3]).name,
        "notes.txt",
        f"{shard.name}{'0' * 62}.7.safetensors",
    }
    assert {path.name for path in engine.files()} == {*left, engine.file(chain[0]).name}
    assert (engine.path / "readme").exists() and (engine.path / "v1" / "ee").is_symlink()
    assert target.read_bytes() == content


def test_damage_that_stays_is_status_1(inspect: Inspect, engine: DiskEngine) -> None:
    flip(engine.file(make_chain(1)[0]), -1)
    assert inspect("--verify", "--prune-older-than", "1000")[0] == 1
    assert inspect("--verify", "--prune-older-than", "0")[0] == 0


@pytest.mark.parametrize("what", ["absent", "file", "other", "link"])
def test_what_is_no_tier_folder_is_refused(inspect: Inspect, tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("")
    elif what in {"other", "link"}:
        path.mkdir()
        (path / "precious.safetensors").write_text("x")
    if what == "link":
        (tmp_path / "real").mkdir()
        (path / "v1").symlink_to(tmp_path / "real")
    for arguments in ((), ("--prune-all",)):
        status, said = inspect(*arguments, path=path)
        assert status == 2 and "is not the folder of a disk tier" in said and 'is the tier\'s "path"' in said
    assert what == "absent" or path.exists()


def test_pruning_where_there_is_nothing_is_refused(inspect: Inspect, tmp_path: Path) -> None:
    DiskFolder(tmp_path / "kv").prepare()
    (tmp_path / "kv" / "v1" / "00" / "notes.txt").write_text("x")
    status, said = inspect("--prune-all")
    assert status == 2 and "holds no objects; nothing was removed" in said


def test_a_folder_of_somebody_else_says_what_to_do(
    inspect: Inspect, engine: DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def closed(path: str, flags: int, *args: object, **kwargs: object) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", closed)
    status, said = inspect()
    assert status == 2 and "(Permission denied); run this as the user whose engine writes it" in said


def test_many_damaged_files_are_not_all_named(inspect: Inspect, tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", page_bytes=(512,))
    objects = [make_chain(1, prompt=number)[0] for number in range(30)]
    engine.write([replace(each, start=0) for each in objects])
    for each in objects:
        os.truncate(engine.file(each), 0)
    status, said = inspect()
    assert status == 1 and "damaged: 30 " in said and "and 10 more" in said and said.count("header") == 21
