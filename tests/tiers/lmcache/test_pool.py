from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from layerstream.errors import TierError
from layerstream.tiers.lmcache.pool import FOLDER, SharedPool

MakeSegment = Callable[..., Path]


@pytest.fixture
def make_segment() -> Iterator[MakeSegment]:
    made: list[Path] = []

    def make_segment(nbytes: int = 1 << 16) -> Path:
        path = FOLDER / f"layerstream-test-{secrets.token_hex(8)}"
        path.write_bytes(bytes(nbytes))
        made.append(path)
        return path

    yield make_segment
    for path in made:
        path.unlink(missing_ok=True)


def test_slots_are_the_segments_own_bytes(make_segment: MakeSegment) -> None:
    path = make_segment()
    pool = SharedPool(path.name, 1 << 16, copies=True)
    pool.slot(4096, 8)[:] = np.arange(8, dtype=np.uint8)
    assert path.read_bytes()[4096:4104] == bytes(range(8))
    pool.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, (1 << 16) + 1), (1 << 16, 1), (8, -4)])
def test_slots_outside_of_the_segment_are_refused(make_segment: MakeSegment, offset: int, nbytes: int) -> None:
    pool = SharedPool(make_segment().name, 1 << 16, copies=True)
    with pytest.raises(TierError, match="outside"):
        pool.slot(offset, nbytes)
    pool.close()


def test_a_segment_that_was_removed_or_made_anew_is_replaced(make_segment: MakeSegment) -> None:
    path = make_segment()
    pool = SharedPool(path.name, 1 << 16, copies=True)
    replaced = [pool.replaced]
    path.unlink()
    replaced.append(pool.replaced)
    path.write_bytes(bytes(1 << 16))
    replaced.append(pool.replaced)
    assert replaced == [False, True, True]
    pool.close()


def test_what_was_handed_out_stays_mapped_after_closing(make_segment: MakeSegment) -> None:
    path = make_segment()
    pool = SharedPool(path.name, 1 << 16, copies=True)
    slot = pool.slot(0, 16)
    pool.close()
    pool.close()
    path.unlink()
    slot[:] = 7
    assert slot.sum() == 7 * 16
    assert pool.replaced
    with pytest.raises(TierError, match="outside"):
        pool.slot(0, 16)


def test_closing_gives_the_memory_back(make_segment: MakeSegment) -> None:
    path = make_segment(8 << 20)
    pool = SharedPool(path.name, 8 << 20, copies=True)
    pool.slot(0, 8 << 20)[:] = 1
    pool.close()
    # Whoever maps the pages ahead lets go of them at the next piece.
    deadline = time.monotonic() + 30
    while path.name in Path("/proc/self/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(path.name in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_what_is_only_watched_is_not_mapped(make_segment: MakeSegment) -> None:
    path = make_segment()
    pool = SharedPool(path.name, 1 << 16, copies=False)
    assert path.name not in Path("/proc/self/maps").read_text()
    path.unlink()
    assert pool.replaced
    pool.close()


def test_a_segment_shorter_than_the_server_says_is_never_mapped(make_segment: MakeSegment) -> None:
    path = make_segment(4096)
    with pytest.raises(TierError, match="4096 bytes, and the server says 8192"):
        SharedPool(path.name, 8192, copies=True)


@pytest.mark.parametrize(
    ("name", "nbytes", "says"),
    [
        ("", 0, "--shm-name NAME --no-l1-use-lazy"),
        ("layerstream-test-of-another-machine", 4096, "must run on this machine, under this user"),
        ("../etc/passwd", 4096, "no name of a segment"),
    ],
)
def test_a_server_without_memory_that_can_be_mapped_is_refused_with_what_to_do(
    name: str, nbytes: int, says: str
) -> None:
    with pytest.raises(TierError, match=says):
        SharedPool(name, nbytes, copies=True)


def test_links_are_not_followed(make_segment: MakeSegment) -> None:
    path = make_segment()
    link = path.with_name(path.name + "-link")
    link.symlink_to(path)
    try:
        with pytest.raises(TierError, match="cannot be opened"):
            SharedPool(link.name, 1 << 16, copies=True)
    finally:
        link.unlink()
