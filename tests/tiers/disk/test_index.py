from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from layerstream.errors import TierError
from layerstream.jobs import TierObject
from layerstream.tiers.disk import index as disk_index
from layerstream.tiers.disk.index import EARLIER_PER_BLOCK_NS, PIN_S
from layerstream.tiers.disk.unfinished import create_unfinished
from tests.rigs.disk_engine import SECOND, DiskEngine
from tests.rigs.tier_items import make_chain


def loose(objects: int, name: str = "") -> list[TierObject]:
    """The first objects of as many prompts."""
    return [make_chain(1, prompt=(name, number))[0] for number in range(objects)]


def used_bytes(engine: DiskEngine) -> int:
    return sum(path.stat().st_size for path in engine.files())


def disk_with(patch: pytest.MonkeyPatch, free_bytes: int) -> None:
    real = os.fstatvfs

    def status(folder: int) -> os.statvfs_result:
        found = list(real(folder))
        found[1], found[4] = 1, max(0, free_bytes)
        return os.statvfs_result(found)

    patch.setattr(os, "fstatvfs", status)


def test_what_all_ranks_have_written_is_found_and_marked_as_used_end_first(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", ranks=2)
    chain = make_chain(4)
    for rank in range(2):
        engine.write(chain[:3], rank)
    engine.write(chain[3:], 1)
    before = engine.file(chain[3], 1).stat().st_mtime_ns
    found = engine.index.find(chain)
    assert found.present == (True, True, True, False) and found.ticket
    for rank in range(2):
        times = [engine.file(each, rank).stat().st_mtime_ns for each in chain[:3]]
        assert times == [engine.now_ns - place * 4 * EARLIER_PER_BLOCK_NS for place in range(3)]
    assert engine.file(chain[3], 1).stat().st_mtime_ns == before


def test_behind_a_gap_nothing_counts_as_used(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv")
    chain = make_chain(3, tail=2)
    engine.write(chain)
    engine.file(chain[1]).unlink()
    before = [engine.file(each).stat().st_mtime_ns for each in chain[2:]]
    assert engine.index.find(chain[:3], chain[3:]).present == (True, False, True, True)
    assert [engine.file(each).stat().st_mtime_ns for each in chain[2:]] == before


def test_of_tails_the_longest_there_counts_as_used(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv")
    chain = make_chain(1)
    tails = [make_chain(1, tail=blocks)[1] for blocks in (1, 2, 3)]
    engine.write([*chain, *tails[:2]])
    before = engine.file(tails[0]).stat().st_mtime_ns
    assert engine.index.find(chain, tails).present == (True, True, True, False)
    assert engine.file(tails[0]).stat().st_mtime_ns == before
    assert engine.file(tails[1]).stat().st_mtime_ns == engine.now_ns - 4 * EARLIER_PER_BLOCK_NS


def test_without_anything_there_is_no_ticket(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv")
    assert engine.index.find(make_chain(2)).ticket == ""
    engine.index.release("disk-99")


@pytest.mark.parametrize("size", [0, 100, 4096, -1, 1])
def test_a_file_of_another_size_is_no_object(tmp_path: Path, size: int) -> None:
    engine = DiskEngine(tmp_path / "kv")
    (each,) = make_chain(1)
    engine.write([each])
    os.truncate(engine.file(each), size if size not in {-1, 1} else engine.object_bytes + size)
    assert engine.present([each]) == (False,)
    assert engine.save([each]) == (True,)
    assert engine.present([each]) == (True,)


def test_the_cap_holds_and_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    objects = loose(50)
    for number, each in enumerate(objects):
        engine.wait(1)
        assert engine.save([each]) == (True,)
        assert engine.present(objects[:1]) == (True,)
        assert used_bytes(engine) <= 10 * engine.object_bytes
        assert engine.present(objects[max(1, number - 7) : number + 1]) == (True,) * min(number, 8)
    assert len(engine.files()) == 10


def test_what_the_cap_exactly_allows_is_allowed(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=2, ranks=2)
    assert engine.save(loose(2)) == (True, True)
    assert len(engine.files()) == 4
    engine.wait(1)
    assert engine.save(loose(3)) == (False, False, True)
    assert len(engine.files()) == 4


def test_a_prompt_longer_than_the_cap_keeps_its_beginning(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=5)
    chain = make_chain(20)
    for first in range(0, 20, 2):
        engine.wait(30)
        engine.save(chain[first : first + 2])
    assert engine.present(chain) == (True,) * 5 + (False,) * 15


def test_of_two_prompts_the_older_loses_its_end_first(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    old, new = make_chain(6, prompt="old"), make_chain(8, prompt="new")
    for each in old:
        engine.wait(0.001)
        engine.save([each])
    engine.wait(5)
    for each in new:
        engine.wait(0.001)
        assert engine.save([each]) == (True,)
    assert engine.present(new) == (True,) * 8
    assert engine.present(old) == (True,) * 2 + (False,) * 4


def test_what_was_found_stays_until_its_ticket_is_given_back(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=4)
    chain = make_chain(3)
    engine.save(chain)
    found = engine.index.find(chain)
    for each in loose(10, "later"):
        engine.wait(20)
        assert engine.save([each]) == (True,)
    assert engine.index.reserve(loose(2, "more")) == (True, False)
    engine.index.settle(loose(2, "more"), written=False)
    assert engine.read(chain) == [True] * 3
    engine.index.release(found.ticket)
    assert engine.save(loose(4, "last")) == (True,) * 4
    assert engine.present(chain) == (False,) * 3


def test_a_ticket_that_is_never_given_back_holds_nothing_for_ever(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=2)
    engine.save(loose(2))
    engine.index.find(loose(1))
    engine.index.find(loose(2)[1:])
    engine.wait(PIN_S - 1)
    assert engine.save(loose(1, "other")) == (False,)
    engine.wait(2)
    assert engine.save(loose(1, "other")) == (True,)


def test_what_is_reserved_counts_until_it_is_settled(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=3)
    objects = loose(5)
    assert engine.index.reserve(objects[:4]) == (True, True, True, False)
    assert engine.index.reserve(objects[:1]) == (False,)
    assert engine.index.reserve(objects[3:]) == (False, False)
    engine.index.settle(objects[:2], written=False)
    assert engine.index.reserve(objects[3:]) == (True, True)
    engine.write([*objects[2:]])
    engine.index.settle(objects[2:], written=True)
    assert engine.index._reserved == {}
    usage = engine.index.usage()
    assert usage is not None
    assert (usage.used_bytes, usage.capacity_bytes, usage.objects) == (3 * engine.object_bytes, usage.used_bytes, 3)


def test_one_object_twice_is_reserved_once(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv")
    (each,) = make_chain(1)
    assert engine.index.reserve([each, each]) == (True, False)


def test_nothing_goes_for_what_does_not_fit_anyway(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=3)
    kept = loose(3)
    engine.save(kept)
    found = engine.index.find(kept[:2])
    too_large = TierObject(key=bytes(32), parent=b"", start=0, blocks=engine.site.chunk_blocks * 2)
    assert engine.index.reserve([too_large]) == (False,)
    engine.index.release(found.ticket)
    assert engine.present(kept) == (True,) * 3


def test_a_full_disk_below_the_cap_makes_room_from_what_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    engine.save(loose(4))
    engine.wait(10)
    with monkeypatch.context() as patch:
        disk_with(patch, free_bytes=engine.object_bytes // 2)
        assert engine.save(loose(1, "new")) == (True,)
        assert len(engine.files()) == 4
        disk_with(patch, free_bytes=engine.object_bytes)
        assert engine.save(loose(1, "newer")) == (True,)
        assert len(engine.files()) == 5
    assert engine.save(loose(1, "newest")) == (True,)
    assert len(engine.files()) == 6


def test_a_failed_write_leaves_nothing_reserved_and_what_ranks_wrote_is_counted(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=2, ranks=2)
    (each,) = loose(1)
    assert engine.index.reserve([each]) == (True,)
    engine.write([each], 0)
    engine.index.settle([each], written=False)
    assert engine.index._contents.used_bytes == used_bytes(engine) == engine.object_bytes // 2
    assert engine.present([each]) == (False,)
    assert engine.save([each]) == (True,)
    assert engine.present([each]) == (True,)


def test_two_engines_see_and_evict_what_the_other_wrote(tmp_path: Path) -> None:
    one = DiskEngine(tmp_path / "kv", cap=6)
    two = DiskEngine(tmp_path / "kv", cap=6, namespace=b"\1" * 32)
    assert two.index.usage() is not None
    ours, theirs = loose(3, "one"), loose(3, "two")
    one.save(ours)
    for engine in (one, two):
        engine.wait(10)
    two.save(theirs)
    one.now_ns += SECOND
    assert one.present(ours[:1]) == (True,)
    two.wait(10)
    assert two.save(loose(3, "more")) == (True,) * 3
    assert used_bytes(two) == 6 * two.object_bytes
    assert two.present(theirs).count(True) == 2
    assert one.present(ours) == (True, False, False)
    usage = two.index.usage()
    assert usage is not None and usage.objects == 6


def test_what_another_engine_used_meanwhile_is_not_old(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=3)
    objects = loose(3)
    for each in objects:
        engine.wait(1)
        engine.save([each])
    used_elsewhere = engine.file(objects[0])
    os.utime(used_elsewhere, ns=(0, engine.now_ns + 5 * SECOND))
    engine.wait(1)
    engine.save(loose(1, "new"))
    assert engine.present(objects) == (True, False, True)


def test_nothing_is_reserved_before_the_whole_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DiskEngine(tmp_path / "kv")
    chain = make_chain(2)
    engine.write(chain[:1])
    with monkeypatch.context() as patch:
        patch.setattr(disk_index, "LIST_S", -1.0)
        assert engine.index.reserve(chain) == (False, False)
        assert engine.index.usage() is None
        assert engine.index.find(chain).present == (True, False)
    assert engine.index.reserve(chain) == (False, True)


def test_listing_again_waits_a_second_unless_something_must_go(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=3)
    engine.save(loose(1))
    strangers = loose(2, "other")
    engine.write(strangers)
    usage = engine.index.usage()
    assert usage is not None and usage.objects == 1
    assert engine.index.reserve(loose(2, "a")) == (True, True)
    engine.index.settle(loose(2, "a"), written=False)
    engine.wait(1)
    usage = engine.index.usage()
    assert usage is not None and usage.objects == 3
    engine.write(loose(3, "another"))
    assert engine.save(loose(1, "b")) == (True,)
    assert used_bytes(engine) == 3 * engine.object_bytes


def test_a_folder_that_cannot_be_tidied_refuses_and_still_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=2)
    kept = loose(2)
    engine.save(kept)

    def read_only(name: str, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", read_only)
        patch.setattr(os, "utime", read_only)
        for _ in range(100):
            assert engine.index.reserve(loose(1, "new")) == (False,)
        assert engine.present(kept) == (True, True)
    (line,) = caplog.messages
    assert "nothing can be evicted from" in line and line.endswith("Read-only file system")
    engine.wait(1)
    assert engine.save(loose(1, "new")) == (True,)


def test_a_folder_that_vanishes_is_empty_and_made_again(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=3)
    objects = loose(3)
    engine.save(objects)
    shutil.rmtree(engine.path)
    engine.wait(1)
    assert engine.index.find(objects).present == (False,) * 3
    engine.index.settle(objects, written=True)
    engine.index.remove(objects)
    usage = engine.index.usage()
    assert usage is not None and (usage.objects, usage.used_bytes) == (0, 0)
    engine.index.probe()
    assert engine.save(objects) == (True,) * 3
    assert engine.present(objects) == (True,) * 3


@pytest.mark.parametrize("written", [True, False])
def test_the_cap_holds_for_a_folder_that_was_away(tmp_path: Path, written: bool) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    objects = loose(10)
    assert engine.save(objects) == (True,) * 10
    engine.wait(5)
    assert engine.save(objects[:1]) == (False,), "it is there"
    (tmp_path / "kv").rename(tmp_path / "away")
    if written:
        assert engine.save(loose(3, "meanwhile")) == (True,) * 3
    else:
        (tmp_path / "kv" / "v1").mkdir(parents=True)
    assert engine.present(objects) == (False,) * 10
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "away").rename(tmp_path / "kv")
    for each in loose(5, "after"):
        assert engine.save([each]) == (True,)
        assert used_bytes(engine) <= 10 * engine.object_bytes
        engine.wait(1)


def test_removing_takes_all_ranks_files(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", ranks=2)
    objects = loose(3)
    engine.save(objects)
    engine.file(objects[0], 0).unlink()
    engine.index.remove(objects[:2])
    assert sorted(engine.files()) == sorted(engine.file(objects[2], rank) for rank in range(2))
    usage = engine.index.usage()
    assert usage is not None and usage.objects == 1


def test_without_a_sign_of_life_the_probe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DiskEngine(tmp_path / "kv")
    engine.index.probe()

    def broken(folder: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fstatvfs", broken)
    with pytest.raises(TierError, match=r"kv cannot be read: Input/output error"):
        engine.index.probe()


def test_a_restart_finds_and_counts_what_was_written_before(tmp_path: Path) -> None:
    first = DiskEngine(tmp_path / "kv", cap=20)
    chain = make_chain(20)
    first.save(chain)
    second = DiskEngine(tmp_path / "kv", cap=20)
    assert second.present(chain) == (True,) * 20
    assert second.read(chain) == [True] * 20
    usage = second.index.usage()
    assert usage is not None and (usage.objects, usage.used_bytes) == (20, 20 * second.object_bytes)


def test_another_namespace_finds_nothing_and_harms_nothing(tmp_path: Path) -> None:
    first = DiskEngine(tmp_path / "kv")
    chain = make_chain(2)
    first.save(chain)
    second = DiskEngine(tmp_path / "kv", namespace=b"\2" * 32)
    assert second.present(make_chain(2, namespace=b"\2" * 32)) == (False, False)
    assert second.read(chain) == [False, False]
    assert first.read(chain) == [True, True]


def test_left_overs_go_at_the_first_question_even_if_there_is_no_time_to_list_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "LIST_S", -1.0)
    engine = DiskEngine(tmp_path / "kv")
    folder = tmp_path / "kv" / "v1" / "ab"
    folder.mkdir()
    for number in range(2):
        (folder / f".{'ab' * 32}.{number}.{'0' * 16}.tmp").touch()
    (folder / "other.tmp").touch()
    opened = os.open(folder, os.O_RDONLY)
    with create_unfinished(opened, "ab" * 32, 2) as (living, _):
        assert engine.index.usage() is None
        assert {path.name for path in folder.iterdir()} == {"other.tmp", living}
    os.close(opened)


def test_nothing_is_reserved_while_a_folder_that_came_back_is_known_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    assert engine.save(loose(10)) == (True,) * 10
    (tmp_path / "kv").rename(tmp_path / "away")
    engine.wait(5)
    assert engine.save(loose(1, "meanwhile")) == (True,)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "away").rename(tmp_path / "kv")
    engine.wait(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(disk_index, "LIST_S", -1.0)
        for number in range(3):
            engine.wait(0.1)
            assert engine.save(loose(1, f"early {number}")) == (False,)
    assert engine.save(loose(1, "after")) == (True,)
    assert used_bytes(engine) <= 10 * engine.object_bytes


def test_what_is_removed_while_the_folder_is_away_still_counts_when_it_comes_back(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    objects = loose(10)
    assert engine.save(objects) == (True,) * 10
    engine.wait(5)
    assert engine.save(objects[:1]) == (False,), "it is there"
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv" / "v1").mkdir(parents=True)
    engine.index.remove(objects[:3])
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "away").rename(tmp_path / "kv")
    assert engine.save(loose(3, "after")) == (True,) * 3
    assert used_bytes(engine) <= 10 * engine.object_bytes


def test_a_reservation_that_breaks_off_reserves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=10)
    objects = loose(3)
    engine.index.usage()
    real, asked = os.fstatvfs, 0

    def breaks(folder: int) -> os.statvfs_result:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", breaks)
        with pytest.raises(OSError, match="Input/output"):
            engine.index.reserve(objects)
    assert asked == 3, "it broke off behind the first object"
    engine.wait(1)
    assert engine.save(objects) == (True,) * 3


def test_a_folder_that_another_takes_the_place_of_during_a_reservation_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DiskEngine(tmp_path / "kv", cap=2)
    objects = loose(2)
    assert engine.save(objects) == (True, True)
    engine.wait(5)
    refresh = engine.index._survey.refresh

    def swapped(*, within_s: float) -> bool:
        (tmp_path / "kv").rename(tmp_path / "away")
        (tmp_path / "kv" / "v1").mkdir(parents=True)
        return refresh(within_s=within_s)

    with monkeypatch.context() as patch:
        patch.setattr(engine.index._survey, "refresh", swapped)
        assert engine.index.reserve(loose(1, "new")) == (False,)
    assert engine.save(loose(1, "new")) == (True,)
