"""The OpenAI server's /metrics after known requests: what it says is what was sent.

A pool of four chunks, of which a prompt takes two: the first prompt is served cold, from the pool, and, once two others
have taken its place there, from disk.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from layerstream.cli.server import examine_server
from layerstream.metric_table import METRICS, PREFIX
from tests.rigs.http_server import HttpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 128
CHUNK = 2 * BLOCK
BLOCK_BYTES = 2 << 20
"""8 layers of keys and values, 4 heads of 64 float32 numbers, 128 tokens."""
TOKENS = 2 * CHUNK + 37
HIT = 2 * CHUNK
SHORT = 10


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=tokens)


Scraped = dict[tuple[str, tuple[str, ...]], float]
"""(name, values of its own labels) -> value."""


def parsed(text: str) -> Scraped:
    values: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric = METRICS.get(family.name.removeprefix(PREFIX))
            own = [label for label in sample.labels if label not in ("engine", "model_name")]
            order = metric.labels if metric is not None and "le" not in own else own
            values[sample.name, tuple(sample.labels[label] for label in order)] = sample.value
    return values


def objects(folder: Path) -> int:
    return len(list(folder.rglob("*.safetensors")))


def wait_for_objects(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60.0
    while objects(folder) < count:
        assert time.monotonic() < deadline, f"{objects(folder)} objects instead of {count}"
        time.sleep(0.05)


class Run(HttpServer):
    """A server that has served the requests."""

    before: str
    after: str


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("metrics")
    folder = root / "kv"
    folder.mkdir(mode=0o700)
    options = {
        "host_gib": 18 / 1024, "chunk_tokens": CHUNK, "log_interval_s": 0.01,
        "load_mode": "layerwise", "eviction": "lru",
        "tiers": [{"type": "disk", "path": str(folder), "gib": 1, "lookup_ms": 20_000}],
    }  # fmt: skip
    with Run(tiny_llama, root / "server.log", options=options) as server:
        server.before = server.scrape()
        first, second, third = map(prompt, range(3))
        server.complete(first)
        server.post("/reset_prefix_cache")
        server.complete(first)
        server.complete(second)
        server.complete(third)
        wait_for_objects(folder, 6)
        server.post("/reset_prefix_cache")
        server.complete(first)
        # What the last step of a request counted is told with the next step.
        server.complete(prompt(9, SHORT), tokens=3)
        server.after = server.scrape()
        yield server


def test_what_was_hit_is_told_by_where_it_was(run: Run) -> None:
    now = parsed(run.after)
    ours = {key: value for key, value in now.items() if key[0].startswith(PREFIX)}

    def of(name: str, *labels: str) -> float:
        return ours[METRICS[name].exported_name, labels]

    assert of("queried_tokens") == 5 * TOKENS + SHORT
    assert of("hit_tokens", "host") == of("hit_tokens", "disk") == HIT
    assert of("hit_requests", "host") == of("hit_requests", "disk") == 1
    assert of("decisions", "fixed") == 2
    # vLLM's own counters, from what the connector told it.
    assert now["vllm:external_prefix_cache_hits_total", ()] == 2 * HIT
    assert now["vllm:external_prefix_cache_queries_total", ()] == 5 * TOKENS + SHORT
    sources = {
        labels[0]: value for (name, labels), value in now.items() if name == "vllm:prompt_tokens_cached_by_source_total"
    }
    assert sources["host"] == sources["disk"] == HIT and sources["external_unspecified"] == 0


def test_what_was_moved_is_told_to_the_byte(run: Run) -> None:
    now = parsed(run.after)

    def of(name: str, *labels: str, part: str = "") -> float:
        return now[METRICS[name].exported_name + part, labels]

    assert of("saved_blocks") == of("transfer_blocks", "save") == 3 * HIT // BLOCK
    assert of("transfer_blocks", "load") == 2 * HIT // BLOCK
    assert of("transfer_bytes", "save") == 3 * HIT // BLOCK * BLOCK_BYTES
    assert of("transfer_bytes", "load") == 2 * HIT // BLOCK * BLOCK_BYTES
    times = {labels: value for (name, labels), value in now.items() if name == f"{PREFIX}load_seconds_count"}
    assert sum(times.values()) == 2
    assert sum(value for (name, _), value in now.items() if name == f"{PREFIX}load_seconds_sum") == pytest.approx(
        of("transfer_seconds", "load")
    )
    assert of("tier_objects", "disk", "write") == 6 and of("tier_objects", "disk", "read") == 2
    assert of("tier_bytes", "disk", "read") > 2 * CHUNK // BLOCK * BLOCK_BYTES
    assert of("promoted_blocks") == HIT // BLOCK


def test_the_pool_and_the_tier_are_told(run: Run) -> None:
    now = parsed(run.after)
    before = parsed(run.before)
    gauges = {
        name: now[f"{PREFIX}{name}", ()]
        for name in ("working", "block_tokens", "pool_slots", "pool_used_slots", "pool_pinned_slots", "overdue_jobs")
    }
    assert gauges == {
        "working": 1, "block_tokens": BLOCK, "pool_slots": 4, "pool_used_slots": 4, "pool_pinned_slots": 0,
        "overdue_jobs": 0,
    }  # fmt: skip
    assert now[f"{PREFIX}pool_bytes", ()] == 4 * CHUNK // BLOCK * BLOCK_BYTES
    # Two prompts came beside the first, which then came back, and two chunks went each time but the first.
    assert now[f"{PREFIX}evicted_chunks_total", ()] == 4
    assert sum(value for (name, _), value in now.items() if name == f"{PREFIX}returned_chunks_total") == 2
    assert now[f"{PREFIX}tier_healthy", ("disk",)] == 1 and now[f"{PREFIX}tier_queue_objects", ("disk",)] == 0
    failures = {labels: value for (name, labels), value in now.items() if name == f"{PREFIX}failures_total"}
    assert failures and not any(failures.values())
    assert before[f"{PREFIX}queried_tokens_total", ()] == 0


def test_the_log_has_counted_the_same(run: Run) -> None:
    said = re.findall(r"LayerStream: hit (\d+)/(\d+) tokens", run.log.read_text())
    assert [sum(map(int, column)) for column in zip(*said, strict=True)] == [2 * HIT, 5 * TOKENS + SHORT]


def test_doctor_finds_what_this_server_lacks_and_nothing_else(run: Run) -> None:
    found = {finding.what: finding for finding in examine_server(run.url)}
    assert "4 slots" in found["host pool"].value
