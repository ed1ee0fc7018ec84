from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstream.chunks import Chunk
from layerstream.index import PrefixIndex
from layerstream.policies import EvictionPolicy
from layerstream.replay import BestPool, IndexPool, next_uses, replay
from layerstream.request_trace import read_trace
from profiles.policies.__main__ import main
from profiles.policies.arc import ARC
from profiles.policies.comparison import NAMES, POOLS, block_cost
from profiles.policies.greedy_dual import GreedyDual
from profiles.policies.s3_fifo import S3FIFO
from profiles.policies.workload import BLOCK_TOKENS, Workload, write

HEAD = Path(__file__).parents[1] / "data" / "conversation_trace_head.jsonl"
OTHERS: dict[str, Callable[[], EvictionPolicy[Chunk]]] = {
    "ARC": ARC,
    "S3-FIFO": S3FIFO,
    "greedy dual": lambda: GreedyDual(block_cost),
}


def chain(*names: object) -> list[bytes]:
    return [repr(names[: end + 1]).encode() for end in range(len(names))]


def save(index: PrefixIndex, prompt: list[bytes]) -> None:
    start = index.known(prompt, 0, len(prompt))
    spans = index.reserve(prompt, start, len(prompt)) if start < len(prompt) else []
    assert spans is not None
    index.publish(spans)


def use(index: PrefixIndex, prompt: list[bytes]) -> int:
    hit = index.match(prompt, len(prompt))
    index.touch(prompt, hit)
    save(index, prompt)
    return hit


@pytest.mark.parametrize("name", OTHERS)
def test_every_policy_keeps_the_indexs_books_under_random_use(name: str) -> None:
    draw = random.Random(0)
    index = PrefixIndex(slots=12, chunk_blocks=2, policy=OTHERS[name]())
    for _ in range(1500):
        prompt = chain(*(draw.randrange(3) for _ in range(draw.randrange(1, 9))))
        hit = index.match(prompt, len(prompt))
        spans = index.locate(prompt, 0, hit)
        assert spans is not None
        index.pin(spans)
        index.touch(prompt, hit)
        start = index.known(prompt, 0, len(prompt))
        new = index.reserve(prompt, start, len(prompt)) if start < len(prompt) else []
        if draw.random() < 0.2:
            index.abandon(new or [])
            index.retire(new or [])
        else:
            index.publish(new or [])
        index.unpin(spans)
        assert index.used == index.chunks <= 12
    filler = [chain("fill", number) for number in range(12)]
    for prompt in filler:
        save(index, prompt)
    assert index.match(filler[-1], 2) == 2


@pytest.mark.parametrize("name", ["ARC", "S3-FIFO"])
def test_what_is_used_again_outlives_a_scan(name: str) -> None:
    index = PrefixIndex(slots=20, chunk_blocks=1, policy=OTHERS[name]())
    hot = [chain("hot", number) for number in range(4)]
    for _, prompt in itertools.product(range(4), hot):
        use(index, prompt)
    for number in range(100):
        use(index, chain("scan", number))
    assert [index.match(prompt, 2) for prompt in hot] == [2, 2, 2, 2]


def test_greedy_dual_keeps_what_is_dear() -> None:
    index = PrefixIndex(slots=40, chunk_blocks=1, policy=GreedyDual(lambda depth: 1.0 + depth))
    deep = chain(*range(20))
    save(index, deep)
    for number in range(30):
        save(index, chain("cheap", number)[:1])
    assert index.match(deep, 20) == 20


def test_deep_blocks_cost_more() -> None:
    assert block_cost(0) == 1
    assert 1.5 < block_cost(50) < block_cost(100) < 4


def test_the_workload_is_the_same_for_a_seed_and_is_read_as_a_trace(tmp_path: Path) -> None:
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    write(one, requests=500, seed=1)
    write(two, requests=500, seed=1)
    write(other, requests=500, seed=2)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    trace = read_trace(one, block_tokens=BLOCK_TOKENS)
    assert len(trace) == 500
    assert trace.distinct < len(trace.blocks)


def test_the_workload_has_chats_agents_and_documents() -> None:
    requests = list(itertools.islice(Workload(0).requests(), 3000))
    seen: set[int] = set()
    fresh = 0
    for request in requests:
        ids = request["hash_ids"]
        fresh += bool(ids) and ids[0] not in seen
        seen.update(ids)
    # Documents share nothing, and so does the first request of each application's chats and agents.
    assert 0.05 < fresh / len(requests) < 0.3
    assert all(request["output_length"] > 0 for request in requests)


def test_a_comparison_is_written_with_where_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--trace",
        str(HEAD),
        "--out",
        str(tmp_path),
        "--sizes",
        "200",
        "400",
        "--requests",
        "200",
        "--jobs",
        "1",
    ]
    assert main(arguments) == 0
    run = json.loads((tmp_path / "policies.json").read_text())
    assert set(run) == {"commit", "machine", "versions", "block tokens", "block MiB of the model", "workloads"}
    assert run["block MiB of the model"] == 64
    rows = run["workloads"]["conversations"]["rows"]
    assert [(row["policy"], row["blocks"]) for row in rows] == [(name, size) for size in (200, 400) for name in NAMES]
    text = (tmp_path / "policies.md").read_text()
    assert "| tokens hit, %, pool of | LRU | adaptive | ARC | S3-FIFO | greedy dual | optimum |" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"conversations.png", "mixed.png"}
    assert text.strip() in capsys.readouterr().out


@pytest.mark.parametrize("name", OTHERS)
def test_no_policy_beats_the_optimum(name: str) -> None:
    trace = read_trace(HEAD, block_tokens=512)
    best = replay(trace, BestPool(400, next_uses(trace))).sum()
    found = replay(trace, POOLS[name](400)).sum()
    assert isinstance(POOLS[name](400), IndexPool)
    assert 0 < found <= best
