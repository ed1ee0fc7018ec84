"""Looks into the files of a disk tier's folder, whoever wrote them: what they say they are, and whether it is true."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from layerstream.canonical import VERSION as CANONICAL_VERSION
from layerstream.errors import ObjectError
from layerstream.tiers.disk.folder import NOT_THERE, SHARDS, DiskFolder, file_status, open_shard, parse_name
from layerstream.tiers.disk.unfinished import is_unfinished
from layerstream.tiers.objects import MAX_HEADER_BYTES, VERSION, ObjectHeader, checksum, parse_header

_DIGEST = re.compile("[0-9a-f]{64}")

State = Literal["whole", "damaged", "other version", "not ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One file that has the name of an object."""

    name: str
    state: State
    nbytes: int
    used_ns: int
    """When it was used last, in nanoseconds of Unix time."""
    header: ObjectHeader | None = None
    """Of what is whole, or only its pages are damaged."""
    why: str = ""
    """What is wrong with it."""


@dataclass(slots=True, kw_only=True)
class Listing:
    """The names in a folder."""

    objects: list[tuple[str, int]] = field(default_factory=list)
    """Name and bytes of each file that has the name of an object."""
    unfinished: list[str] = field(default_factory=list)
    """Files that are being written, or were."""
    others: int = 0
    """Files and folders that are not ours."""


class _Head(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(default_factory=dict, name="__metadata__")


def list_folder(folder: DiskFolder) -> Listing:
    """Everything in a folder, one level deep where it is not ours.

    Raises:
        OSError: it cannot be listed.
    """
    found = Listing(others=sum(1 for _ in folder.path.iterdir()) - 1)
    with folder.objects() as objects:
        for shard in sorted(os.listdir(objects)):  # noqa: PTH208 - of an open folder
            try:
                with open_shard(objects, shard) as opened:
                    if shard not in SHARDS:
                        raise NotADirectoryError(shard)
                    _list_shard(opened, shard, found)
            except NOT_THERE:
                found.others += 1
    return found


def _list_shard(opened: int, shard: str, found: Listing) -> None:
    for name in sorted(os.listdir(opened)):
        status = file_status(opened, name)
        if status is not None and is_unfinished(name):
            found.unfinished.append(name)
        elif status is not None and parse_name(name) is not None and name.startswith(shard):
            found.objects.append((name, status.st_size))
        else:
            found.others += 1


def audit(
    folder: DiskFolder, names: list[tuple[str, int]], *, verify: bool, progress: Callable[[int], None]
) -> Iterator[Audited]:
    """Look into files, one after another; those that vanish meanwhile are passed over.

    Args:
        folder: where they are.
        names: `Listing.objects`.
        verify: whether to read all of each and compare checksums; otherwise only headers are read.
        progress: told the bytes of each file that is done.

    Raises:
        OSError: a file cannot be read.
    """
    with folder.objects() as objects:
        for name, nbytes in names:
            try:
                with open_shard(objects, name[:2]) as shard:
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=shard)
            except FileNotFoundError:
                continue
            with open(file, "rb") as opened:  # noqa: PTH123 - an open file
                if stat.S_ISREG(os.fstat(file).st_mode):
                    yield _look_into(name, opened, verify=verify)
            progress(nbytes)


def _look_into(name: str, file: BinaryIO, *, verify: bool) -> Audited:
    status = os.fstat(file.fileno())

    def audited(state: State, why: str = "", header: ObjectHeader | None = None) -> Audited:
        nbytes, used_ns = status.st_size, status.st_mtime_ns
        return Audited(name=name, state=state, why=why, header=header, nbytes=nbytes, used_ns=used_ns)

    length = int.from_bytes(file.read(8), "little")
    head = file.read(min(length, MAX_HEADER_BYTES, status.st_size))
    try:
        said = msgspec.json.decode(head, type=_Head).metadata
    except (msgspec.MsgspecError, RecursionError):
        return audited("damaged", "it has no safetensors header")
    if said.get("format") != "layerstream":
        return audited("not ours")
    if said.get("version") != str(VERSION) or said.get("canonical", str(CANONICAL_VERSION)) != str(CANONICAL_VERSION):
        return audited("other version")
    try:
        header = parse_header(length.to_bytes(8, "little") + head)
    except ObjectError as error:
        return audited("damaged", str(error))
    if (header.key, header.rank) != parse_name(name) or not _DIGEST.fullmatch(header.namespace):
        return audited("damaged", "it is another object")
    if header.nbytes != status.st_size:
        return audited("damaged", f"it has {status.st_size} bytes instead of {header.nbytes}", header)
    if verify:
        for layer, size, wanted in zip(header.layers, header.page_bytes, header.checksums, strict=True):
            if checksum([np.fromfile(file, dtype=np.uint8, count=header.blocks * size)]) != wanted:
                return audited("damaged", f"bytes of layer {layer!r} are damaged", header)
    return audited("whole", header=header)
