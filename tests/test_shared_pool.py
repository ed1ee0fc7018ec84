"""Ranks with the same KV and one pool: who opens whose memory, and when each keeps its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from layerstream import shared_pool
from layerstream.errors import PoolError
from layerstream.host_pool import HostPool
from layerstream.shared_pool import PoolShare, Replicas, share_pool
from tests.rigs.meeting import Meeting


def all_at_once(ranks: int, count: int, act: Callable[[Replicas], Any]) -> list[Any]:
    meeting = Meeting(ranks)
    replicas = [Replicas(count=count, rank=rank, exchange=meeting.exchange(rank)) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(act, replicas))


def files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def pool(share: PoolShare | None) -> HostPool:
    return HostPool(page_bytes=[4096, 8192], chunk_blocks=2, budget_bytes=1, segment_bytes=1 << 16, share=share)


def test_each_group_of_replicas_has_one_pool_that_its_first_rank_writes() -> None:
    before = files()
    shares = all_at_once(4, 2, lambda replicas: share_pool((replicas.rank + 1) << 18, replicas))
    assert [(share.writes, share.budget_bytes >> 18) for share in shares] == [
        (True, 1), (False, 1), (True, 3), (False, 3),
    ]  # fmt: skip
    pools = [pool(share) for share in shares]
    assert [its.slots for its in pools[:2]] == [pools[0].slots] * 2
    assert pools[2].slots > pools[0].slots > 1
    last = pools[0].pages - 1
    for its, value in ((pools[0], 7), (pools[2], 9)):
        its.span(0, 0, 1).fill_(value)
        its.span(1, last, 1).fill_(value + 1)
    for its, value in zip(pools, (7, 7, 9, 9), strict=True):
        assert set(its.span(0, 0, 1).tolist()) == {value}
        assert set(its.span(1, last, 1).tolist()) == {value + 1}
    firsts = range(0, pools[0].pages, pools[0].pages_per_segment)
    assert len(firsts) > 2
    for page in firsts:
        pools[0].span(0, page, 1).fill_(page)
    assert [int(pools[1].span(0, page, 1)[0]) for page in firsts] == list(firsts)
    for its in pools:
        its.close()
    assert files() == before


def test_on_several_machines_each_rank_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = files()
    monkeypatch.setattr(shared_pool, "_machine", lambda: threading.current_thread().name)
    assert all_at_once(2, 2, lambda replicas: share_pool(1 << 18, replicas)) == [None, None]
    assert "2 ranks with the same KV are on several machines" in caplog.text
    assert files() == before


def test_if_one_rank_cannot_open_the_memory_all_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = files()
    real = os.open

    def refused(path: Any, *arguments: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refused)
    assert all_at_once(2, 2, lambda replicas: share_pool(1 << 18, replicas)) == [None, None]
    assert files() == before


def test_without_such_files_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(PoolError, match="cannot share memory between processes"):
        share_pool(1 << 18, Replicas(count=1, rank=0, exchange=lambda value: [value]))


SECOND_RANK = """
import pickle, sys
from layerstream.host_pool import HostPool
from layerstream.shared_pool import Replicas, share_pool

def tell(value):
    pickle.dump(value, sys.stdout.buffer)
    sys.stdout.buffer.flush()

def exchange(value):
    tell(value)
    return pickle.load(sys.stdin.buffer)

share = share_pool(1 << 18, Replicas(count=2, rank=1, exchange=exchange))
its = HostPool(page_bytes=[4096, 8192], chunk_blocks=2, budget_bytes=1, segment_bytes=1 << 16, share=share)
tell("mapped")
pickle.load(sys.stdin.buffer)
tell(bytes(its.span(1, 3, 1).numpy()))
its.close()
"""


def test_processes_see_each_others_bytes_and_leave_nothing_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", SECOND_RANK], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        said, heard = other.stdin, other.stdout

        def tell(value: Any) -> None:
            pickle.dump(value, said)
            said.flush()

        def exchange(value: Any) -> list[Any]:
            both = [value, pickle.load(heard)]
            tell(both)
            return both

        its = pool(share_pool(1 << 18, Replicas(count=2, rank=0, exchange=exchange)))
        assert pickle.load(heard) == "mapped"
        its.span(1, 3, 1).fill_(0x5A)
        tell("written")
        assert pickle.load(heard) == b"\x5a" * 8192
        assert other.wait(60) == 0
    its.close()
    assert not [path for path in Path("/dev/shm").iterdir() if "layerstream-pool" in path.name]
