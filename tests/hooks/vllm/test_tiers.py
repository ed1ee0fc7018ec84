"""Tiers under vLLM's real scheduler: real worker halves, I/O threads and checks, over a tier in memory."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerstream.errors import ConfigError
from layerstream.tiers.base import IndexSite, Item, Tier, TierIndex
from tests.rigs.books import check_books, check_tiers_idle
from tests.rigs.installed_tiers import installed, write_weights
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt
from tests.rigs.tier_faults import Fails, FaultyTier, Hangs, Lies

CHUNK = 4
OPTIONS = {"host_gib": 1 / 64, "chunk_tokens": CHUNK * BLOCK, "staging_mib": 1, "tiers": [{"type": "memory"}]}
LATEST_S = 20.0
"""Much longer than anything here takes that does not hang."""

MakeRig = Callable[..., SchedulerRig]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def make_rig(tmp_path: Path, tier: MemoryTier) -> Iterator[MakeRig]:
    """Makes engines of one model, whose tier "memory" is one and the same unless another is given."""
    rigs: list[SchedulerRig] = []
    write_weights(tmp_path)

    def make(*, tiers: dict[str, Tier] | None = None, **arguments: Any) -> SchedulerRig:
        options = {**OPTIONS, **arguments.pop("options", {})}
        with installed({"memory": tier} if tiers is None else tiers):
            rigs.append(SchedulerRig(tmp_path, options=options, **arguments))
        return rigs[-1]

    with ExitStack() as stack:
        yield make
        for rig in rigs:
            stack.callback(rig.close)


def drain(rig: SchedulerRig, until: Callable[[], object] | None = None) -> None:
    """Step until the connector has nothing to do, and until that is true."""
    latest = time.monotonic() + LATEST_S
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    while (
        rig.connector.has_pending_push_work()
        or (coordinator.tiering is not None and len(coordinator.tiering._flights))
        or not (until is None or until())
    ):
        assert time.monotonic() < latest, "something hangs"
        rig.step()
        time.sleep(0.001)


def served(rig: SchedulerRig, name: str, tokens: list[int], **arguments: Any) -> int:
    """Serve a request and let all that it leaves be written; the prompt tokens that were not computed."""
    hit = rig.serve(name, tokens, **arguments)
    drain(rig)
    return hit


def assert_idle(rig: SchedulerRig, tier: MemoryTier, num_blocks: int = 64) -> None:
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    drain(rig, until=lambda: not tier.owed)
    assert rig.free_blocks == num_blocks - 1, "blocks leaked"
    check_tiers_idle(coordinator)
    check_books(coordinator)
    assert tier.overpaid == 0


def whole_hit(tokens: int) -> int:
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_another_engine_hits_what_the_first_one_served(
    make_rig: MakeRig, tier: MemoryTier, mode: str, ranks: int
) -> None:
    lengths = [BLOCK - 1, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK, 10 * BLOCK + 3, 300]
    first = make_rig(options={"load_mode": mode}, ranks=ranks)
    for seed, tokens in enumerate(lengths):
        assert served(first, f"r{seed}", prompt(tokens, seed)) == 0
    second = make_rig(options={"load_mode": mode}, ranks=ranks)
    for seed, tokens in enumerate(lengths):
        assert served(second, f"r{seed}", prompt(tokens, seed)) == whole_hit(tokens), tokens
        assert second.outputs[f"r{seed}"] == first.outputs[f"r{seed}"]
    for rig in (first, second):
        assert_idle(rig, tier)


def test_a_tier_without_tails_gives_whole_chunks(make_rig: MakeRig) -> None:
    tier = MemoryTier(tails=False)
    served(make_rig(tiers={"memory": tier}), "a", prompt(300))
    rig = make_rig(tiers={"memory": tier})
    assert served(rig, "a", prompt(300)) == 256
    assert_idle(rig, tier)


def test_the_tiers_are_asked_in_order_and_together_give_a_prefix(make_rig: MakeRig) -> None:
    tiers = {"near": MemoryTier(), "far": MemoryTier()}
    named = [{"type": "near"}, {"type": "far"}]
    served(make_rig(tiers=tiers, options={"tiers": named}), "a", prompt(300))
    for key in list(tiers["near"].kept)[1::2]:
        del tiers["near"].kept[key]
    rig = make_rig(tiers=tiers, options={"tiers": named})
    assert served(rig, "a", prompt(300)) == whole_hit(300)
    for tier in tiers.values():
        assert tier.calls["read"] > 0
        assert_idle(rig, tier)


def test_a_tier_that_is_only_read_stays_as_it_is(make_rig: MakeRig, tier: MemoryTier) -> None:
    served(make_rig(), "a", prompt(100))
    kept = dict(tier.kept)
    rig = make_rig(options={"tiers": [{"type": "memory", "write": False}]})
    assert served(rig, "a", prompt(100)) == whole_hit(100)
    served(rig, "b", prompt(100, seed=1))
    assert tier.kept == kept


@pytest.mark.parametrize(("role", "writes", "reads"), [("kv_producer", True, False), ("kv_consumer", False, True)])
def test_a_role_holds_for_tiers_too(make_rig: MakeRig, tier: MemoryTier, role: str, writes: bool, reads: bool) -> None:
    named = [{"type": "memory", "admission": "all"}]
    served(make_rig(), "known", prompt(100))
    kept = len(tier.kept)
    rig = make_rig(kv_role=role, options={"tiers": named})
    finds = tier.calls["find"]
    assert served(rig, "known", prompt(100)) == (whole_hit(100) if reads else 0)
    served(rig, "new", prompt(100, seed=1))
    assert (len(tier.kept) > kept) == writes
    assert (tier.calls["find"] > finds) == reads


def test_a_consumer_does_not_write_what_it_reuses(make_rig: MakeRig) -> None:
    source, other = MemoryTier(), MemoryTier()
    served(make_rig(tiers={"memory": source}), "a", prompt(100))
    named = [{"type": "memory"}, {"type": "other", "admission": "reused"}]
    rig = make_rig(tiers={"memory": source, "other": other}, options={"tiers": named}, kv_role="kv_consumer")
    for name in "abc":
        assert served(rig, name, prompt(100)) == whole_hit(100)
        rig.scheduler.reset_prefix_cache()
    assert not other.kept


@pytest.mark.parametrize("what", ["weights", "namespace", "chunks"])
def test_another_engine_finds_nothing_of_a_different_one(make_rig: MakeRig, tmp_path: Path, what: str) -> None:
    served(make_rig(), "a", prompt(100))
    options: dict[str, Any] = {}
    match what:
        case "weights":
            write_weights(tmp_path, b"efgh")
        case "namespace":
            options = {"namespace": "other"}
        case "chunks":
            options = {"chunk_tokens": 2 * BLOCK}
    assert served(make_rig(options=options), "a", prompt(100)) == 0


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm.layerstream")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm.layerstream"):
        yield caplog
    logger.removeHandler(caplog.handler)


def test_weights_without_a_name_turn_tiers_off_and_the_log_says_so(
    make_rig: MakeRig, tier: MemoryTier, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").unlink()
    rig = make_rig()
    assert "the tiers are off for this engine: the weights have no fingerprint" in told.text
    assert "tiers none" in told.text
    served(rig, "a", prompt(100))
    assert rig.scheduler.reset_prefix_cache()
    assert served(rig, "b", prompt(100)) == whole_hit(100)
    assert not tier.calls


def test_the_log_names_the_tiers_and_what_they_did(make_rig: MakeRig, told: pytest.LogCaptureFixture) -> None:
    served(make_rig(), "a", prompt(300))
    told.clear()
    rig = make_rig()
    assert "tiers memory, loads auto" in told.text
    served(rig, "a", prompt(300))
    rig.connector.shutdown()
    lines = [record.message for record in told.records if "LayerStream tiers:" in record.message]
    line = dict.fromkeys(lines).popitem()[0]
    assert line.startswith("LayerStream tiers: promoted 18 blocks; memory read 0.")
    assert "wrote 0 B" in line and "fell" not in line


def test_a_tier_that_can_never_work_stops_the_start_and_lets_go_of_the_others(
    make_rig: MakeRig, told: pytest.LogCaptureFixture
) -> None:
    class Hopeless(MemoryTier):
        def open_index(self, site: IndexSite) -> TierIndex:  # type: ignore[override]
            raise ConfigError("memory cannot be had like this; ask for less")

    good = MemoryTier()
    with pytest.raises(ConfigError, match="ask for less"):
        make_rig(tiers={"good": good, "bad": Hopeless()}, options={"tiers": [{"type": "good"}, {"type": "bad"}]})
    assert good.closed["index"] == 1
    assert "memory cannot be had like this; ask for less" in told.text


@pytest.mark.parametrize("where", ["", "cache", "cache/deeper"])
def test_a_tier_among_the_models_files_is_refused(make_rig: MakeRig, tmp_path: Path, where: str) -> None:
    # Its objects are safetensors files, and would change the fingerprint of the weights with every write.
    class Near(MemoryTier):
        folder = tmp_path / where

    with pytest.raises(ConfigError, match=r"tier near at .* lies in the model's folder .*; use a folder outside"):
        make_rig(tiers={"near": Near()}, options={"tiers": [{"type": "near"}]})


# Requests that wait.


def test_requests_on_one_prefix_at_once_are_served_by_one_promotion(make_rig: MakeRig, tier: MemoryTier) -> None:
    shared = prompt(8 * BLOCK)
    served(make_rig(), "a", shared)
    rig = make_rig()
    for number in range(4):
        rig.add(f"r{number}", [*shared, *prompt(number + 1, seed=9)])
    rig.run()
    drain(rig)
    assert [rig.hits[f"r{number}"] for number in range(4)] == [8 * BLOCK] * 4
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None and coordinator.tiering is not None
    assert coordinator.tiering.take_counts().promoted_blocks == 8
    assert_idle(rig, tier)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_an_abort_at_any_step_leaks_nothing(make_rig: MakeRig, tier: MemoryTier, after: int) -> None:
    served(make_rig(), "a", prompt(300))
    rig = make_rig(step_tokens=64)
    rig.add("aborted", prompt(300), max_tokens=50)
    for _ in range(after):
        rig.step()
    rig.abort("aborted")
    assert served(rig, "again", prompt(300)) == whole_hit(300)
    assert_idle(rig, tier)


def test_a_request_that_vllm_lets_hit_nothing_asks_no_tier(make_rig: MakeRig, tier: MemoryTier) -> None:
    served(make_rig(), "a", prompt(100))
    rig = make_rig()
    rig.add("b", prompt(100))
    rig.requests["b"].skip_reading_prefix_cache = True
    rig.run()
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None and coordinator.tiering is not None
    assert rig.hits["b"] == 0 and coordinator.tiering.clients[0].stats.lookups == 0


def test_preempted_requests_come_back_right(make_rig: MakeRig, tier: MemoryTier) -> None:
    for number in range(3):
        served(make_rig(), "a", prompt(4 * BLOCK + number, seed=number))
    rig = make_rig(num_blocks=20)
    for number in range(3):
        rig.add(f"r{number}", prompt(4 * BLOCK + number, seed=number), max_tokens=5 * BLOCK)
    rig.run()
    assert sum(request.num_preemptions for request in rig.requests.values()) > 0, "nothing was preempted"
    assert [len(rig.outputs[f"r{number}"]) for number in range(3)] == [5 * BLOCK] * 3
    assert_idle(rig, tier, num_blocks=20)


def test_a_reset_of_the_connector_ends_the_use_of_tiers(make_rig: MakeRig, tier: MemoryTier) -> None:
    served(make_rig(), "a", prompt(100))
    rig = make_rig()
    rig.add("b", prompt(100))
    rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.run()
    kept = len(tier.kept)
    assert rig.hits["b"] == 0
    served(rig, "c", prompt(100, seed=1))
    assert len(tier.kept) == kept
    assert_idle(rig, tier)


def test_a_tenant_fills_its_share_of_the_pool_and_no_more(make_rig: MakeRig, tier: MemoryTier) -> None:
    rig = make_rig(options={"tenant_share": 0.25, "host_gib": 16 * CHUNK * BLOCK * 3 * 32 / (1 << 30), "tiers": []})
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None and coordinator._index is not None
    share = coordinator._index.tenant_slots
    assert share < coordinator.pool_slots
    rig.serve("other", prompt(CHUNK * BLOCK, seed=99))
    for number in range(coordinator.pool_slots + 2):
        rig.add(f"r{number}", prompt(CHUNK * BLOCK, seed=number))
        rig.requests[f"r{number}"].cache_salt = "greedy"
        rig.run()
    assert coordinator.pool_used == share + 1


# Tiers that fail.


def test_a_dead_tier_costs_its_misses_alone(make_rig: MakeRig, tier: MemoryTier) -> None:
    tier.alive = False
    rig = make_rig()
    for number in range(6):
        assert served(rig, f"r{number}", prompt(100, seed=number)) == 0
        assert rig.scheduler.reset_prefix_cache()
        assert served(rig, f"again{number}", prompt(100, seed=number)) == whole_hit(100)
        assert rig.scheduler.reset_prefix_cache()
    assert not rig.connector.has_pending_push_work()
    assert not tier.kept


def test_what_waited_in_vain_for_a_dead_tier_is_told_at_the_end(
    make_rig: MakeRig, tier: MemoryTier, told: pytest.LogCaptureFixture
) -> None:
    tier.alive = False
    rig = make_rig()
    for number in range(3):
        served(rig, f"r{number}", prompt(2 * CHUNK * BLOCK, seed=number))
    rig.connector.shutdown()
    dropped = re.findall(r"(\d+) objects not written", told.text)
    assert sum(map(int, dropped)) >= 6


def flip(item: Item) -> None:
    item.layers[0][0][3] ^= 1


@pytest.mark.parametrize("fault", ["reads fail", "reads lie", "writes fail", "lookups fail"])
def test_a_tier_that_fails_costs_no_more_than_its_hits(make_rig: MakeRig, fault: str) -> None:
    faulty = FaultyTier()
    if fault == "writes fail":
        faulty.store = Fails(only=["write"])
    first = make_rig(tiers={"memory": faulty})
    served(first, "a", prompt(300))
    # Whoever does nothing does not ask whether an ill tier is well again, and only then it is told.
    drain(first, until=lambda: not faulty.inner.owed)
    match fault:
        case "reads fail":
            faulty.store = Fails(only=["read"])
        case "reads lie":
            faulty.store = Lies(flip)
        case "lookups fail":
            faulty.index = Fails(only=["find"])
    rig = make_rig(tiers={"memory": faulty})
    assert served(rig, "a", prompt(300)) == 0
    assert rig.outputs["a"]
    drain(rig, until=lambda: not faulty.inner.owed)
    assert faulty.inner.overpaid == 0


@pytest.mark.parametrize("what", ["find", "read"])
def test_a_tier_that_hangs_holds_a_request_up_for_a_bounded_time(make_rig: MakeRig, what: str) -> None:
    faulty, hangs = FaultyTier(), Hangs(what)
    served(make_rig(tiers={"memory": faulty}), "a", prompt(300))
    if what == "find":
        faulty.index = hangs
    else:
        faulty.store = hangs
    rig = make_rig(tiers={"memory": faulty}, options={"tiers": [{"type": "memory", "lookup_ms": 250}]})
    try:
        assert rig.serve("a", prompt(300)) == 0
        assert hangs.held
        assert rig.serve("b", prompt(300, seed=1)) == 0
    finally:
        hangs.let_go()
    drain(rig, until=lambda: not faulty.inner.owed)
    assert faulty.inner.overpaid == 0


def test_damaged_objects_are_never_served_and_are_replaced(make_rig: MakeRig, tier: MemoryTier) -> None:
    served(make_rig(), "a", prompt(8 * BLOCK + 1))
    assert len(tier.kept) == 2
    last = list(tier.kept)[-1]
    whole = {rank: data.copy() for rank, data in tier.kept[last].items()}
    for data in tier.kept[last].values():
        data[-1] ^= 0xFF
    rig = make_rig()
    assert served(rig, "a", prompt(8 * BLOCK + 1)) == 4 * BLOCK
    again = make_rig()
    assert served(again, "a", prompt(8 * BLOCK + 1)) == 8 * BLOCK
    for rank, data in tier.kept[last].items():
        assert np.array_equal(data, whole[rank])


def test_the_rig_would_see_bytes_that_no_check_found(
    make_rig: MakeRig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(make_rig(), "a", prompt(100))
    for ranks in tier.kept.values():
        for data in ranks.values():
            data[-BLOCK:] ^= 1
    monkeypatch.setattr("layerstream.tiers.objects.ObjectFormat.check", lambda *args, **more: None)
    rig = make_rig()
    with pytest.raises(AssertionError, match="wrong KV"):
        rig.serve("a", prompt(100))


def test_what_came_from_a_tier_passes_verification(make_rig: MakeRig, tier: MemoryTier) -> None:
    served(make_rig(tiers={"memory": tier}), "a", prompt(300))
    rig = make_rig(tiers={"memory": tier}, options={"verify": True})
    assert served(rig, "b", prompt(300)) == whole_hit(300)
