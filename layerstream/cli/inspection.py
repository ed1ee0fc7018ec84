"""`layerstream inspect`: what is in the folder of a disk tier, whether it is whole, and what of it should go."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from layerstream.cli.plan import size
from layerstream.errors import ConfigError
from layerstream.tiers.disk.audit import Audited, Listing, audit, list_folder
from layerstream.tiers.disk.folder import OBJECTS, DiskFolder, open_shard
from layerstream.tiers.disk.unfinished import remove_left_over
from layerstream.tiers.objects import ObjectHeader

SHOWN = 20
"""Damaged files that are named one by one."""
SHORT = 8
"""Digits of a namespace that are shown; as many tell two apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What to remove: everything that one of these says."""

    damaged: bool = False
    """Damaged objects, and unfinished files that dead processes left behind."""
    namespace: str = ""
    """Objects of the one namespace that begins with these hex digits."""
    older_than_days: float | None = None
    """Objects not used for longer."""
    everything: bool = False

    def __bool__(self) -> bool:
        return self.damaged or bool(self.namespace) or self.older_than_days is not None or self.everything


def run(path: Path, *, verify: bool, pruning: Pruning) -> int:
    """Print what is there, and what was removed; 1 if damaged objects stay.

    Args:
        path: the folder of a disk tier.
        verify: whether to read everything and compare checksums; pruning what is damaged does it too.
        pruning: what to remove.

    Raises:
        ConfigError: it is not such a folder, cannot be read, or has nothing that could be pruned.
    """
    console, folder = Console(), DiskFolder(path.absolute())
    if not (path / OBJECTS).is_dir() or (path / OBJECTS).is_symlink():
        raise ConfigError(
            f"{path} is not the folder of a disk tier: it has no folder {OBJECTS}; name the folder that is the tier's "
            '"path"'
        )
    try:
        listing = list_folder(folder)
        files = _audited(console, folder, listing, verify=verify or pruning.damaged)
        console.print(_table(path, [file.header for file in files if file.state == "whole" and file.header], files))
        _print_rest(console, listing, files, verified=verify or pruning.damaged)
        if not pruning:
            return int(any(file.state == "damaged" for file in files))
        ours = [file for file in files if file.state in {"whole", "damaged"}]
        if not ours and not listing.unfinished:
            raise ConfigError(f"{path} holds no objects; nothing was removed")
        return _prune(console, folder, listing, ours, pruning)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read or changed ({error.strerror or error}); run this as the user whose engine writes it"
        ) from error


def _audited(console: Console, folder: DiskFolder, listing: Listing, *, verify: bool) -> list[Audited]:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        total = sum(nbytes for _, nbytes in listing.objects)
        task = bar.add_task("verifying" if verify else "reading headers", total=total)
        return list(audit(folder, listing.objects, verify=verify, progress=lambda done: bar.advance(task, done)))


def _table(path: Path, headers: Sequence[ObjectHeader], files: Sequence[Audited]) -> Table:
    whole = [file for file in files if file.state == "whole"]
    objects, nbytes = len({header.key for header in headers}), sum(file.nbytes for file in whole)
    # Tokens are those of a whole chunk, ages those of the last use.
    title = f"{escape(str(path))}: {objects:,} objects in {len(whole):,} files, {size(nbytes)}"
    table = Table(title=title, title_justify="left")
    for column in ("namespace", "objects", "ranks", "bytes", "tokens", "oldest", "newest"):
        table.add_column(column, justify="left" if column == "namespace" else "right", no_wrap=True)
    for namespace in sorted({header.namespace for header in headers}):
        mine = [(file, file.header) for file in whole if file.header and file.header.namespace == namespace]
        used = [file.used_ns for file, _ in mine]
        table.add_row(
            namespace[:SHORT],
            f"{len({header.key for _, header in mine}):,}",
            f"{len({header.rank for _, header in mine})}",
            size(sum(file.nbytes for file, _ in mine)),
            f"{max(header.tokens for _, header in mine):,}",
            _when(min(used)),
            _when(max(used)),
        )
    return table


def _when(used_ns: int) -> str:
    return f"{datetime.fromtimestamp(used_ns / 1e9):%Y-%m-%d}"


def _print_rest(console: Console, listing: Listing, files: Sequence[Audited], *, verified: bool) -> None:
    def counted(state: str) -> int:
        return sum(file.state == state for file in files)

    note = "" if verified else " (only headers were read; --verify reads everything)"
    console.print(f"damaged: {counted('damaged'):,}{note}", soft_wrap=True)
    damaged = [file for file in files if file.state == "damaged"]
    for file in damaged[:SHOWN]:
        console.print(f"  [red]damaged[/] {file.name}: {escape(file.why)}", soft_wrap=True)
    if len(damaged) > SHOWN:
        console.print(f"  and {len(damaged) - SHOWN:,} more")
    console.print(f"unfinished: {len(listing.unfinished):,}")
    console.print(
        f"left alone: {counted('other version'):,} of another format version, "
        f"{counted('not ours') + listing.others:,} not from layerstream"
    )


def _prune(console: Console, folder: DiskFolder, listing: Listing, ours: Sequence[Audited], pruning: Pruning) -> int:
    namespace = _namespace(ours, pruning.namespace)
    days = pruning.older_than_days
    oldest_ns = 0 if days is None else time.time_ns() - int(days * 86400e9)
    rules: list[tuple[str, bool, Callable[[Audited], bool]]] = [
        ("damaged", pruning.damaged, lambda file: file.state == "damaged"),
        (
            f"of namespace {namespace[:SHORT]}",
            bool(namespace),
            lambda file: file.header is not None and file.header.namespace == namespace,
        ),
        (f"not used for {days or 0:g} days", days is not None, lambda file: file.used_ns < oldest_ns),
        ("all others", pruning.everything, lambda file: True),
    ]
    left = list(ours)
    for what, wanted, matches in rules:
        if wanted:
            gone = [file for file in left if matches(file)]
            left = [file for file in left if not matches(file)]
            _unlink(folder, (file.name for file in gone))
            console.print(f"removed {len(gone):,} files, {size(sum(file.nbytes for file in gone))}: {what}")
    if pruning.damaged or pruning.everything:
        with folder.objects() as objects:
            count = sum(_remove_left_over(objects, name) for name in listing.unfinished)
        console.print(f"removed {count:,} unfinished files of processes that are gone")
    return int(any(file.state == "damaged" for file in left))


def _namespace(ours: Sequence[Audited], digits: str) -> str:
    if not digits:
        return ""
    known = sorted({file.header.namespace for file in ours if file.header is not None})
    found = [each for each in known if each.startswith(digits.lower())]
    if len(found) != 1:
        listed = ", ".join(each[:SHORT] for each in known) or "none"
        raise ConfigError(f"{len(found)} namespaces begin with {digits!r}, and one must; there are: {listed}")
    return found[0]


def _unlink(folder: DiskFolder, names: Iterable[str]) -> None:
    with folder.objects() as objects:
        for name in names:
            with contextlib.suppress(FileNotFoundError), open_shard(objects, name[:2]) as shard:
                os.unlink(name, dir_fd=shard)


def _remove_left_over(objects: int, name: str) -> bool:
    with open_shard(objects, name[1:3]) as shard:
        return remove_left_over(shard, name)
