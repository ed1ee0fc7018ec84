from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.disk.folder import SHARDS, DiskFolder, file_name, file_status, open_shard, parse_name

KEY = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path: Path) -> DiskFolder:
    made = DiskFolder(tmp_path / "kv")
    made.prepare()
    return made


@pytest.mark.parametrize("rank", [0, 7, 10, 999_999])
def test_a_name_is_read_back(rank: int) -> None:
    assert parse_name(file_name(KEY, rank)) == (KEY, rank)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        f"{KEY}.0.safetensors.bak",
        f"{KEY}.0.safetensors\n",
        f"{KEY}.00.safetensors",
        f"{KEY}.-1.safetensors",
        f"{KEY}.1000000.safetensors",
        f"{KEY}.٣.safetensors",
        f"{KEY.upper()}.0.safetensors",
        f"{KEY[:-1]}.0.safetensors",
        f"{KEY}0.0.safetensors",
        f"{KEY}.0.v2.safetensors",
        f"x{KEY}.0.safetensors",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert parse_name(name) is None


def test_preparing_leaves_nothing_but_folders_and_may_be_repeated(folder: DiskFolder) -> None:
    folder.prepare()
    assert [path.name for path in folder.path.rglob("*")] == ["v1", SHARDS[0]]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_anybody_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv" / "v1").mkdir(parents=True)
    for part in (tmp_path / "kv", tmp_path / "kv" / "v1"):
        part.chmod(mode)
        with pytest.raises(ConfigError, match=r"world-writable, .* run `chmod -R o-w"):
            DiskFolder(tmp_path / "kv").prepare()
        part.chmod(0o700)
    DiskFolder(tmp_path / "kv").prepare()


def test_a_folder_below_one_that_anybody_may_write_is_used(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    DiskFolder(tmp_path / "volume" / "kv").prepare()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder; name one"):
        DiskFolder(tmp_path / "file").prepare()
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskFolder(tmp_path / "file" / "below").prepare()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "v1").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskFolder(tmp_path / "kv").prepare()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot be used \(Read-only file system\); name a folder that this user may"
    ):
        DiskFolder(tmp_path / "kv").prepare()


@pytest.fixture
def other_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open files belong to somebody else than what is asked for by name."""
    real = os.fstat

    def fstat(file: int) -> os.stat_result:
        found = list(real(file))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", fstat)


def test_objects_of_another_user_are_refused(tmp_path: Path, other_owner: None) -> None:
    with pytest.raises(ConfigError, match=r"v1 belongs to another user \(id \d+\), who could change what is in it"):
        DiskFolder(tmp_path / "kv").prepare()


def test_links_below_the_folder_are_not_followed(folder: DiskFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("x")
    (folder.path / "v1" / "ab").symlink_to(elsewhere)
    with folder.objects() as objects:
        with pytest.raises(NotADirectoryError), open_shard(objects, "ab", create=True):
            pass
        os.symlink(elsewhere / "file", "link", dir_fd=objects)
        assert file_status(objects, "link") is None
    (folder.path / "v1").rename(tmp_path / "moved")
    (folder.path / "v1").symlink_to(tmp_path / "moved")
    with pytest.raises(NotADirectoryError), folder.objects(create=True):
        pass
    with pytest.raises(ConfigError, match="v1 is not a folder; remove it"):
        folder.prepare()


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    DiskFolder(tmp_path / "link").prepare()
    assert (tmp_path / "real" / "v1").is_dir()


def test_a_folder_that_others_got_access_to_is_used_no_more(folder: DiskFolder) -> None:
    (folder.path / "v1").chmod(0o777)
    with pytest.raises(TierError, match="can be changed by others"), folder.objects():
        pass
    (folder.path / "v1").chmod(0o700)
    with folder.objects():
        pass


def test_a_folder_that_was_swapped_for_anothers_is_used_no_more(
    folder: DiskFolder, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("other_owner")
    with pytest.raises(TierError, match="can be changed by others"), folder.objects():
        pass


def test_a_folder_that_vanished_is_made_again_for_writers_only(folder: DiskFolder) -> None:
    folder.path.rename(folder.path.with_name("moved"))
    with pytest.raises(FileNotFoundError), folder.objects():
        pass
    with folder.objects(create=True) as objects, open_shard(objects, "ab", create=True):
        assert (folder.path / "v1" / "ab").is_dir()


def test_no_file_stays_open(folder: DiskFolder) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    folder.prepare()
    with folder.objects() as objects:
        for shard in SHARDS[:4]:
            with open_shard(objects, shard, create=True):
                pass
        with pytest.raises(FileNotFoundError), open_shard(objects, "ff"):
            pass
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
