"""Cache events: what a router is told of host and disk is what is there, in the words of vLLM's own events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from layerstream.hooks.vllm.block_hashes import BlockHashes
from layerstream.hooks.vllm.events import KVEvents
from tests.hooks.vllm.test_request_identity import ALL, IdentityRig, make_request
from tests.hooks.vllm.test_tiers import drain
from tests.rigs.event_replay import Replay, pool_content
from tests.rigs.installed_tiers import installed, write_weights
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


def ours(rig: SchedulerRig) -> list[Any]:
    """The connector's events since the last call."""
    events = [event for event in rig.published if not isinstance(event, AllBlocksCleared) and event.medium != "GPU"]
    rig.published.clear()
    return events


def by_block(events: list[Any]) -> dict[Any, tuple[Any, ...]]:
    """What stored events say of each block but where it is."""
    said: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        parent = event.parent_block_hash
        for number, each in enumerate(event.block_hashes):
            tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            keys = None if event.extra_keys is None else event.extra_keys[number]
            said[each] = (
                parent, tuple(tokens), event.block_size, event.lora_id, event.lora_name, keys, event.group_idx,
                event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window,
            )  # fmt: skip
            parent = each
    return said


@pytest.mark.parametrize("who", ["nothing", "adapter X and salt X"])
def test_events_say_of_a_block_what_vllms_own_say(make_rig: MakeRig, tmp_path: Path, who: str) -> None:
    rig: Any = make_rig(IdentityRig, events=True)
    ids = prompt(5 * BLOCK + 3)
    rig.serve_as("a", ids, ALL[who], tmp_path)
    gpu = by_block([event for event in rig.published if isinstance(event, BlockStored) and event.medium == "GPU"])
    cpu = by_block([event for event in rig.published if isinstance(event, BlockStored) and event.medium == "CPU"])
    assert cpu == gpu and len(cpu) == 5


@pytest.mark.parametrize("who", ALL)
def test_whatever_a_request_has_beside_its_tokens_is_told_as_vllms_block_pool_tells_it(
    tmp_path: Path, who: str
) -> None:
    init_none_hash(sha256)
    request = make_request("a", prompt(5 * BLOCK + 3), ALL[who], tmp_path)
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(5), 0, 5, BLOCK, 0)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    events = KVEvents(cache, (0,), block_tokens=BLOCK, media={})
    hashes = BlockHashes().of(request)
    events.seen(request, hashes)
    events.reserved(hashes)
    events.published(hashes[:2])
    events.published(hashes[2:])
    # vLLM says the kind of attention only where the events leave its cache manager.
    said = {each: facts[:-2] for each, facts in by_block(events.take()).items()}
    assert said == {each: facts[:-2] for each, facts in by_block(pool.take_events()).items()}
    assert len(said) == 5


def test_blocks_that_decoding_fills_are_told_too(make_rig: MakeRig) -> None:
    rig = make_rig(events=True)
    rig.serve("a", prompt(2 * BLOCK + 3), max_tokens=3 * BLOCK)
    gpu = by_block([event for event in rig.published if event.medium == "GPU"])
    cpu = by_block([event for event in rig.published if event.medium == "CPU"])
    assert cpu == gpu and len(cpu) == 5


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_a_replay_of_all_events_is_the_pool_at_any_time(make_rig: MakeRig, mode: str) -> None:
    """A pool of few chunks, requests that share prefixes, aborts and resets."""
    rig = make_rig(events=True, num_blocks=24, options={"host_gib": 0.00006, "load_mode": mode})
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    replay, draw = Replay(), random.Random(5)
    for turn in range(60):
        rig.add(
            f"{turn}",
            [*prompt(draw.randrange(8 * BLOCK), seed=draw.randrange(4)), 7],
            max_tokens=draw.randrange(40) + 1,
        )
        for _ in range(draw.randrange(8)):
            rig.step()
            replay.hear(ours(rig) + rig.connector.take_events())
            assert replay.at("CPU") == pool_content(coordinator)
        if draw.random() < 0.2:
            rig.abort(f"{turn}")
        if draw.random() < 0.03:
            rig.connector.reset_cache()
        elif draw.random() < 0.1 and mode == "layerwise":
            # vLLM does not take parked requests off their blocks.
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    replay.hear(ours(rig) + rig.connector.take_events())
    assert replay.at("CPU") == pool_content(coordinator)
    events: Any = rig.connector.scheduler._events
    assert coordinator.stats.evicted_chunks > 10
    index: Any = coordinator._index
    indexed = {each for chunk in index._heads.values() for each in chunk.hashes}
    assert set(events._blocks) == set(events._holders) == indexed, "descriptions of what is nowhere"
    assert rig.connector.reset_cache() is True
    replay.hear(rig.connector.take_events())
    assert replay.at("CPU") == set() and not events._blocks and not events._holders


def test_without_vllms_option_nothing_is_described_or_told(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.serve("a", prompt(5 * BLOCK + 3))
    half = rig.connector.scheduler
    assert half._events is None and list(rig.connector.take_events()) == []
    assert half._coordinator is not None and half._coordinator._index is not None
    assert half._coordinator._index.listener is None


def beside(model: Path) -> Path:
    """The folder of a tier: not among the model's files."""
    return model.with_name(f"{model.name}-kv")


def disk(model: Path, chunks: float = 1000) -> dict[str, Any]:
    folder = beside(model)
    folder.mkdir(mode=0o700, exist_ok=True)
    write_weights(model)
    # A block is 3 layers of 16 tokens of 32 bytes; an object has a header too, and all of it is padded.
    return {"tiers": [{"type": "disk", "path": str(folder), "gib": chunks * 16384 / (1 << 30), "lookup_ms": 20_000}]}


def test_copies_on_disk_are_told_when_they_are_written_and_again_when_they_go(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(events=True, options=disk(tmp_path))
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    replay = Replay()

    def hear() -> list[Any]:
        drain(rig)
        events = [*ours(rig), *rig.connector.take_events()]
        replay.hear(events)
        return events

    rig.serve("a", prompt(9 * BLOCK + 3))
    said = [event for event in hear() if event.medium == "DISK"]
    assert {event.ownership for event in said} == {"disk"}
    assert replay.at("DISK", "disk") == replay.at("CPU") == pool_content(coordinator)
    # Whoever removes a file: the engine sees it go when it next looks.
    for file in beside(tmp_path).rglob("*.safetensors"):
        file.unlink()
    deadline = time.monotonic() + 60.0
    number = 0
    while replay.at("DISK", "disk") & {each for event in said for each in event.block_hashes}:
        assert time.monotonic() < deadline
        number += 1
        rig.serve(f"other {number}", prompt(4 * BLOCK + 1, seed=number))
        hear()
        time.sleep(0.05)
    assert set(said[0].block_hashes) <= replay.at("CPU")


def test_a_tail_that_grew_stays_in_its_place(make_rig: MakeRig, tmp_path: Path) -> None:
    """The object of six blocks is replaced by one of eight: its blocks are on disk all the time."""
    rig = make_rig(events=True, options=disk(tmp_path))
    replay = Replay()
    rig.serve("a", prompt(6 * BLOCK + 3))
    drain(rig)
    replay.hear(ours(rig))
    first = set(replay.at("DISK", "disk"))
    rig.serve("b", prompt(8 * BLOCK + 3))
    for _ in range(20):
        drain(rig)
        rig.serve(f"{_}", [5])
        events = ours(rig)
        replay.hear(events)
        assert first <= replay.at("DISK", "disk")
    assert len(first) == 6 and len(replay.at("DISK", "disk")) == 8


def test_after_a_reset_no_tier_has_anything_for_this_engine(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(events=True, options=disk(tmp_path))
    replay = Replay()
    rig.serve("a", prompt(6 * BLOCK + 3))
    drain(rig)
    rig.connector.reset_cache()
    rig.serve("b", prompt(6 * BLOCK + 3))
    drain(rig)
    replay.hear(ours(rig) + rig.connector.take_events())
    assert replay.at("DISK", "disk") == set() and len(replay.at("CPU")) == 6


def test_a_tier_that_cannot_tell_what_it_loses_is_not_told_of(make_rig: MakeRig, tmp_path: Path) -> None:
    write_weights(tmp_path)
    with installed({"memory": MemoryTier()}):
        rig = make_rig(events=True, options={"tiers": [{"type": "memory"}]})
    rig.serve("a", prompt(6 * BLOCK + 3))
    drain(rig)
    assert {event.medium for event in ours(rig)} == {"CPU"}


def test_with_several_groups_an_event_names_none(make_rig: MakeRig) -> None:
    rig = make_rig(events=True, windows=(None, 2 * BLOCK))
    rig.serve("a", prompt(5 * BLOCK + 3))
    assert {event.group_idx for event in ours(rig)} == {None}


ONE, TWO, THREE = (number.to_bytes(32, "big") for number in (1, 2, 3))
"""Hashes that events say as 1, 2 and 3."""


def request(hashes: list[bytes], name: str = "a") -> Any:
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, lora_request=None, all_token_ids=list(range(16 * len(hashes))),
        mm_features=[], cache_salt=None, prompt_embeds=None, prompt_embeds_per_block_hashes={},
    )  # fmt: skip


@pytest.fixture
def events() -> KVEvents:
    spec: Any = SimpleNamespace(kv_cache_groups=[None, None])
    return KVEvents(spec, (0, 1), block_tokens=16, media={"disk": "DISK"})


def test_a_block_in_two_objects_of_a_tier_goes_with_the_last_of_them(events: KVEvents) -> None:
    hashes = [ONE, TWO, THREE]
    events.seen(request(hashes), hashes)
    events.stored("disk", b"tail", hashes[:2])
    events.stored("disk", b"whole", hashes)
    events.stored("disk", b"whole", hashes)
    assert [event.block_hashes for event in events.take()] == [[1, 2], [3]]
    events.removed("disk", b"tail")
    assert events.take() == []
    events.removed("disk", b"whole")
    events.removed("disk", b"whole")
    assert [event.block_hashes for event in events.take()] == [[1, 2, 3]]


def test_what_nobody_can_describe_any_more_is_not_told(events: KVEvents) -> None:
    hashes = [ONE, TWO]
    events.seen(request(hashes), hashes)
    events.forget("a")
    events.stored("disk", b"x", hashes)
    assert events.take() == [] and not events._blocks


def test_a_streaming_session_that_went_on_elsewhere_keeps_no_old_descriptions(events: KVEvents) -> None:
    first, second = [ONE, TWO], [ONE, THREE]
    events.seen(request(first), first)
    events.seen(request(second), second)
    assert set(events._blocks) == {ONE, THREE}
    events.forget("a")
    assert not events._blocks and not events._holders
