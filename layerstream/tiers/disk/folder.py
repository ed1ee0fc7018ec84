"""The folder of a disk tier: how its files are named, opened and tidied, and who may have access to it.

    PATH/v1/<first two digits of the key>/<key>.<rank>.safetensors

Folders are made 0700 and files 0600. Below PATH each step is opened by itself, and no symbolic link is followed. A file
gets its name once it is whole (`layerstream.tiers.disk.unfinished`). Whatever is named otherwise is not ours, and left
alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.disk.unfinished import create_unfinished
from layerstream.tiers.objects import VERSION

OBJECTS = f"v{VERSION}"
"""The only name in the folder that is ours. Objects of another format version lie beside it."""
SHARDS = tuple(f"{number:02x}" for number in range(256))

NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What opening a folder of objects raises if there is none, or something else in its place, or one that is closed."""

_NAME = re.compile(r"([0-9a-f]{64})\.(0|[1-9][0-9]{0,5})\.safetensors")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def file_name(key: str, rank: int) -> str:
    """Of one rank's object; `key` in hex digits."""
    return f"{key}.{rank}.safetensors"


def parse_name(name: str) -> tuple[str, int] | None:
    """(key, rank) of a file's name; None if the name is not ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def file_status(folder: int, name: str) -> os.stat_result | None:
    """Of a regular file in an open folder; None if there is none of this name.

    Raises:
        OSError: the system cannot tell.
    """
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


class DiskFolder:
    """The folder at an absolute path; nothing is touched until it is used.

    Args:
        path: of the folder; it may be a symbolic link itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner: int | None = None

    def path_of(self, name: str) -> Path:
        """Where a file of this name is, for messages."""
        return self.path / OBJECTS / name[:2] / name

    def prepare(self) -> None:
        """Make the folder if it is not there, and make sure that nobody else can change what is in it.

        From then on every access makes sure of it again. Folders above are not looked at: volumes of containers are
        often mounted world-writable, and who may swap this folder for another still cannot make one that belongs to us.

        Raises:
            ConfigError: it cannot be used, or others could change it.
        """
        try:
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path} is not a folder; name one, or a path where one can be made")
            self._make()
            self._refuse_open_to_all(self.path.stat())
            found = (self.path / OBJECTS).lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise ConfigError(f"{self.path / OBJECTS} is not a folder; remove it, or name another folder")
            self._refuse_open_to_all(found)
            # Not the process's own user id: network filesystems may give files to another. Made where it is found if
            # this process dies here.
            with (
                self.objects() as objects,
                open_shard(objects, SHARDS[0], create=True) as shard,
                create_unfinished(shard, SHARDS[0] * 32, 0) as (name, file),
            ):
                owner = os.fstat(file).st_uid
                os.unlink(name, dir_fd=shard)
        except OSError as error:
            raise ConfigError(
                f"folder {self.path} cannot be used ({error.strerror or error}); name a folder that this user may "
                "write, on a filesystem that is not read-only"
            ) from error
        if found.st_uid != owner:
            raise ConfigError(
                f"folder {self.path / OBJECTS} belongs to another user (id {found.st_uid}), who could change what is "
                f"in it; give it to user {owner}, or name another folder"
            )
        self._owner = owner

    @contextmanager
    def objects(self, *, create: bool = False) -> Iterator[int]:
        """The open folder of all objects, made again if it has vanished and `create` is set.

        Raises:
            TierError: since `prepare`, it was replaced by a folder that others can change.
            OSError: it cannot be opened; FileNotFoundError if it is not there.
        """
        try:
            folder = self._open_objects()
        except FileNotFoundError:
            if not create:
                raise
            self._make()
            folder = self._open_objects()
        try:
            if self._owner is not None:
                found = os.fstat(folder)
                if found.st_uid != self._owner or found.st_mode & stat.S_IWOTH:
                    raise TierError(f"folder {self.path / OBJECTS} can be changed by others; nothing in it is used")
            yield folder
        finally:
            os.close(folder)

    def _open_objects(self) -> int:
        above = os.open(self.path, _FOLDER)
        try:
            return os.open(OBJECTS, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / OBJECTS).mkdir(mode=0o700, exist_ok=True)

    def _refuse_open_to_all(self, found: os.stat_result) -> None:
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"folder {self.path} is world-writable, so anybody on this machine could change what is in it; run "
                f"`chmod -R o-w {self.path}`, or name a folder of your own"
            )


@contextmanager
def open_shard(objects: int, shard: str, *, create: bool = False) -> Iterator[int]:
    """One open folder of those that objects are spread over, made if it is not there and `create` is set.

    Args:
        objects: `DiskFolder.objects`.
        shard: one of `SHARDS`; a key is in that of its first two digits.
        create: whether to make it.

    Raises:
        OSError: it cannot be opened; FileNotFoundError if it is not there.
    """
    try:
        folder = os.open(shard, _FOLDER | os.O_NOFOLLOW, dir_fd=objects)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(shard, 0o700, dir_fd=objects)
        folder = os.open(shard, _FOLDER | os.O_NOFOLLOW, dir_fd=objects)
    try:
        yield folder
    finally:
        os.close(folder)
