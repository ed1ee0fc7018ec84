"""Ranks with the same KV and one pool: who opens whose memory, and when each keeps its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import PIPE
from typing import Any

import pytest

from layerstream import shared_pool
from layerstream.errors import PoolError
from layerstream.host_pool import HostPool
from layerstream.shared_pool import PoolShare, Replicas, share_pool

LATEST_S = 30.0


class Meeting:
    """Threads that tell each other values, as ranks do."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._told: list[Any] = [None] * ranks

    def exchange(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self._told[rank] = value
            self._barrier.wait(LATEST_S)
            everyone = list(self._told)
            self._barrier.wait(LATEST_S)
            return everyone

        return exchange


def all_at_once(ranks: int, count: int, act: Callable[[Replicas], Any]) -> list[Any]:
    meeting, results = Meeting(ranks), [None] * ranks

    def run(rank: int) -> None:
        results[rank] = act(Replicas(count=count, rank=rank, exchange=meeting.exchange(rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATEST_S)
    return results


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    assert not [name for name in os.listdir("/dev/shm") if "layerstream-pool" in name]
