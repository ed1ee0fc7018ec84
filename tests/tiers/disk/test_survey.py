from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from layerstream.tiers.disk import survey as disk_survey
from layerstream.tiers.disk.contents import DiskContents
from layerstream.tiers.disk.folder import SHARDS, DiskFolder, open_shard
from layerstream.tiers.disk.survey import UNSURE_NS, DiskSurvey
from layerstream.tiers.disk.unfinished import create_unfinished

SECOND = 1_000_000_000


class Watched:
    """A folder, what is known of it, and which of its parts were listed."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = DiskFolder(path)
        self.folder.prepare()
        self.contents = DiskContents()
        self.now_ns, self.uptime_s, self.tick_s = 2_000_000_000 * SECOND, 0.0, 0.0
        self.survey = DiskSurvey(self.folder, self.contents, clock=lambda: self.now_ns, monotonic=self.tick)
        self.listed: list[str] = []
        real = DiskSurvey._list

        def note(survey: DiskSurvey, folder: int, shard: str, stop_at: float) -> bool:
            self.listed.append(shard)
            return real(survey, folder, shard, stop_at)

        monkeypatch.setattr(DiskSurvey, "_list", note)

    def tick(self) -> float:
        self.uptime_s += self.tick_s
        return self.uptime_s

    def put(self, shard: str, number: int, rank: int = 0, size: int = 5000) -> Path:
        path = self.folder.path / "v1" / shard / f"{shard}{number:062x}.{rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
        return path

    def refresh(self) -> list[str]:
        """The parts of the folder that it took to know all of it."""
        self.listed.clear()
        assert self.survey.refresh(within_s=10)
        return self.listed

    def known(self) -> set[tuple[str, int]]:
        names = (path.name.split(".") for path in (self.folder.path / "v1").rglob("*.safetensors"))
        files = {(key, int(rank)) for key, rank, *_ in names}
        return {(key, rank) for key, rank in files if self.contents.has(key, rank)}


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path / "kv", monkeypatch)


def test_what_is_there_at_the_start_is_known(watched: Watched) -> None:
    paths = [watched.put(shard, number, rank) for shard in ("00", "ab", "ff") for number in (0, 1) for rank in (0, 1)]
    os.utime(paths[0], ns=(0, 7 * SECOND))
    os.utime(paths[1], ns=(0, 5 * SECOND))
    watched.refresh()
    assert (watched.contents.objects, watched.contents.used_bytes) == (6, 12 * 5000)
    entry = watched.contents.get("00" + "0" * 62)
    assert entry is not None and (entry.used_ns, entry.sizes) == (7 * SECOND, {0: 5000, 1: 5000})


def test_what_is_not_ours_is_neither_counted_nor_touched(watched: Watched, tmp_path: Path) -> None:
    good = watched.put("ab", 1)
    place = good.parent
    (place / "notes.txt").write_bytes(bytes(9999))
    (place / f"{'ab' * 32}.0.safetensors.part").write_bytes(bytes(9999))
    for other in ("00", "cd"):
        (place / f"{other * 32}.0.safetensors").write_bytes(bytes(9999))
    (place / f"{'ab' * 32}.1.safetensors").symlink_to(good)
    (place / f"{'ab' * 32}.2.safetensors").mkdir()
    os.mkfifo(place / f"{'ab' * 32}.3.safetensors")
    (place / ".hidden.tmp").write_bytes(b"")
    (place.parent / "newer").mkdir()
    (place.parent / "abc").write_bytes(bytes(9999))
    (place.parent / "cd").symlink_to(tmp_path)
    (watched.folder.path / "v2" / "ab").mkdir(parents=True)
    (watched.folder.path / "v2" / "ab" / good.name).write_bytes(bytes(9999))
    (place.parent / "ce").write_bytes(bytes(9999))
    before = sorted(path for path in watched.folder.path.rglob("*"))
    watched.refresh()
    assert (watched.contents.objects, watched.contents.used_bytes) == (1, 5000)
    with watched.folder.objects() as objects:
        for key in ("cd" * 32, "ce" * 32):
            assert watched.survey.ask(objects, key, [0]) == {}
            watched.survey.touch(objects, key, 0)
            watched.survey.unlink(objects, key, [0])
    assert sorted(path for path in watched.folder.path.rglob("*")) == before


@pytest.mark.parametrize("size", [0, 1, 4095])
def test_what_is_too_short_for_an_object_is_none(watched: Watched, size: int) -> None:
    path = watched.put("ab", 1, size=size)
    watched.refresh()
    assert (watched.contents.objects, watched.contents.used_bytes) == (0, 0)
    with watched.folder.objects() as objects:
        assert watched.survey.ask(objects, path.name[:64], [0]) == {}
    assert path.exists()


def test_only_what_changed_is_listed_again(watched: Watched) -> None:
    paths = [watched.put(shard, 0) for shard in ("00", "ab", "ff")]
    assert watched.refresh() == ["00", "ab", "ff"]
    assert watched.refresh() == []
    watched.put("ab", 1)
    watched.put("cd", 1)
    paths[2].unlink()
    assert watched.refresh() == ["ab", "cd", "ff"]
    assert watched.refresh() == []
    assert watched.known() == {
        (f"{shard}{number:062x}", 0) for shard, number in (("00", 0), ("ab", 0), ("ab", 1), ("cd", 1))
    }
    assert (watched.contents.objects, watched.contents.used_bytes) == (4, 4 * 5000)


def test_a_change_too_fresh_to_be_the_last_is_looked_at_again(watched: Watched) -> None:
    path = watched.put("ab", 0)
    changed = path.parent.stat().st_mtime_ns
    for late, again in ((UNSURE_NS - 1, ["ab"]), (-5 * SECOND, ["ab"]), (UNSURE_NS + 1, ["ab"]), (UNSURE_NS + 1, [])):
        watched.now_ns = changed + late
        assert [shard for shard in watched.refresh() if shard == "ab"] == again
    assert watched.contents.objects == 1


def test_listing_takes_turns_and_ends(watched: Watched) -> None:
    for shard in ("00", "7f", "ff"):
        for number in range(disk_survey.FILES_PER_LOOK_AT_THE_CLOCK + 10):
            watched.put(shard, number)
    watched.tick_s = 0.4
    turns = 1
    while not watched.survey.refresh(within_s=1.0):
        turns += 1
        assert turns < 50
    assert turns > 2
    assert watched.contents.objects == 3 * (disk_survey.FILES_PER_LOOK_AT_THE_CLOCK + 10)
    watched.tick_s = 0.0
    assert watched.refresh() == []


def test_a_turn_that_ends_amid_a_folder_drops_nothing(watched: Watched) -> None:
    for number in range(3 * disk_survey.FILES_PER_LOOK_AT_THE_CLOCK):
        watched.put("ab", number)
    watched.refresh()
    known = watched.contents.objects
    for number in range(1000, 1000 + 2 * disk_survey.FILES_PER_LOOK_AT_THE_CLOCK):
        watched.put("ab", number)
    watched.tick_s = 0.4
    assert not watched.survey.refresh(within_s=0.5)
    assert watched.contents.objects >= known


def test_left_overs_go_the_first_time_around_and_living_writers_files_stay(watched: Watched) -> None:
    watched.put("ab", 0)
    with watched.folder.objects() as objects, open_shard(objects, "ab") as folder:
        with create_unfinished(folder, "ab" * 32, 0) as (dead, _):
            pass
        with create_unfinished(folder, "ab" * 32, 1) as (living, _):
            watched.refresh()
            names = {path.name for path in (watched.folder.path / "v1" / "ab").iterdir()}
            assert dead not in names and living in names and len(names) == 2
    assert watched.contents.objects == 1


def test_what_a_process_leaves_that_dies_while_it_prepares_the_folder_goes_too(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda name, **kwargs: None)
        watched.folder.prepare()
    (left,) = [path for path in watched.folder.path.rglob("*") if not path.is_dir()]
    watched.refresh()
    assert not left.exists()


def test_a_left_over_that_cannot_be_removed_is_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.put("ab", 0)
    (watched.folder.path / "v1" / "ab" / f".{'ab' * 32}.0.{'1' * 16}.tmp").mkdir()
    watched.refresh()
    assert watched.contents.objects == 1
    (line,) = caplog.messages
    assert "is left over, and stays: Is a directory" in line


def test_a_folder_that_vanished_holds_nothing(watched: Watched) -> None:
    watched.put("ab", 0)
    watched.put("cd", 0)
    watched.refresh()
    shutil.rmtree(watched.folder.path / "v1" / "ab")
    watched.refresh()
    assert watched.contents.objects == 1
    shutil.rmtree(watched.folder.path)
    watched.refresh()
    assert (watched.contents.objects, watched.contents.used_bytes) == (0, 0)
    watched.folder.prepare()
    watched.put("cd", 5)
    watched.refresh()
    assert watched.known() == {(f"cd{5:062x}", 0)}


def test_asking_corrects_what_is_known(watched: Watched) -> None:
    path = watched.put("ab", 0, rank=1)
    key = path.name[:64]
    with watched.folder.objects() as objects:
        assert watched.survey.ask(objects, key, range(3)) == {1: 5000}
        assert watched.contents.used_bytes == 5000
        path.write_bytes(bytes(6000))
        os.utime(path, ns=(0, 3_000_000_000 * SECOND))
        assert watched.survey.ask(objects, key, range(3)) == {1: 6000}
        entry = watched.contents.get(key)
        assert entry is not None and entry.used_ns == 3_000_000_000 * SECOND
        path.unlink()
        assert watched.survey.ask(objects, key, range(3)) == {}
    assert watched.contents.objects == 0


def test_a_touch_shows_in_every_ranks_file(watched: Watched) -> None:
    paths = [watched.put("ab", 0, rank) for rank in (0, 1)]
    watched.refresh()
    with watched.folder.objects() as objects:
        watched.survey.touch(objects, paths[0].name[:64], 5 * SECOND)
        watched.survey.touch(objects, "cd" * 32, 5 * SECOND)
    assert [path.stat().st_mtime_ns for path in paths] == [5 * SECOND] * 2
    entry = watched.contents.get(paths[0].name[:64])
    assert entry is not None and entry.used_ns == 5 * SECOND
    assert SHARDS[0xCD] == "cd" and watched.contents.get("cd" * 32) is None
