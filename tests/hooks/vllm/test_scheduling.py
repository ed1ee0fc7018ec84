"""The connector under vLLM's real scheduler: every KV byte that attention would read is checked in every step."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from layerstream import assembly
from layerstream.hooks.vllm.connector import LayerStreamConnector
from layerstream.hooks.vllm.messages import WorkerReport
from layerstream.host_pool import HostPool
from layerstream.insertion import AdaptiveInsertion
from layerstream.jobs import Report
from layerstream.policies import LRU
from tests.rigs.fake_pinning import FakePinner, until
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, WrongBytes, prompt

OPTIONS = {"host_gib": 0.002, "chunk_tokens": 4 * BLOCK, "staging_mib": 1}

MakeRig = Callable[..., SchedulerRig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[SchedulerRig] = []

    def make(**arguments: Any) -> SchedulerRig:
        options = {**OPTIONS, **arguments.pop("options", {})}
        rigs.append(SchedulerRig(tmp_path, options=options, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def assert_idle(rig: SchedulerRig, num_blocks: int = 64) -> None:
    """Nothing is held, pinned or due once every request has ended."""
    assert rig.free_blocks == num_blocks - 1, "blocks leaked"
    blocks = rig.scheduler.kv_cache_manager.block_pool.blocks
    assert all(block.ref_cnt == 0 for block in blocks if not block.is_null)
    assert not rig.connector.scheduler.pending()


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 10 * BLOCK + 3, 300])
def test_a_prompt_comes_back_from_the_pool(make_rig: MakeRig, mode: str, tokens: int) -> None:
    rig = make_rig(options={"load_mode": mode})
    ids = prompt(tokens)
    assert rig.serve("cold", ids) == 0
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", ids) == (tokens - 1) // BLOCK * BLOCK
    assert rig.outputs["warm"] == rig.outputs["cold"]
    assert_idle(rig)


def test_the_rig_sees_wrong_bytes(make_rig: MakeRig) -> None:
    rig = make_rig()
    ids = prompt(100)
    rig.serve("cold", ids)
    pool = rig.workers[0].worker.engine.pool  # type: ignore[union-attr]
    pool.span(1, 2, 1)[0] ^= 1
    assert rig.scheduler.reset_prefix_cache()
    with pytest.raises(WrongBytes, match="request warm, layer 1: wrong KV at tokens"):
        rig.serve("warm", ids)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_requests_that_share_a_prefix_run_together(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(options={"load_mode": mode})
    shared = prompt(5 * BLOCK + 7, seed=1)
    prompts = {f"r{i}": shared + prompt(20 + i, seed=10 + i) for i in range(4)}
    for name, ids in prompts.items():
        rig.add(f"cold-{name}", ids, max_tokens=3)
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    for name, ids in prompts.items():
        rig.add(f"warm-{name}", ids, max_tokens=3)
    rig.run()
    for name in prompts:
        assert rig.hits[f"warm-{name}"] >= 5 * BLOCK
        assert rig.outputs[f"warm-{name}"] == rig.outputs[f"cold-{name}"]
    assert_idle(rig)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_preempted_requests_come_back_right(make_rig: MakeRig, caching: bool) -> None:
    rig = make_rig(num_blocks=20, prefix_caching=caching)
    for index in range(3):
        rig.add(f"r{index}", prompt(4 * BLOCK + index, seed=index), max_tokens=5 * BLOCK)
    rig.run()
    assert sum(request.num_preemptions for request in rig.requests.values()) > 0, "nothing was preempted"
    for index in range(3):
        assert len(rig.outputs[f"r{index}"]) == 5 * BLOCK
    assert_idle(rig, num_blocks=20)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_abort_at_any_step_leaks_nothing(make_rig: MakeRig, mode: str, after: int) -> None:
    rig = make_rig(options={"load_mode": mode}, step_tokens=64)
    ids = prompt(200)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    rig.add("aborted", ids, max_tokens=50)
    for _ in range(after):
        rig.step()
    rig.abort("aborted")
    rig.run()
    assert_idle(rig)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", ids) == 12 * BLOCK
    assert_idle(rig)


def test_a_hit_is_offered_only_after_every_rank_reported(make_rig: MakeRig) -> None:
    rig = make_rig(ranks=2)
    ids = prompt(100)
    rig.held_back = {1}
    rig.add("cold", ids)
    for _ in range(5):
        rig.step()
    assert rig.scheduler.reset_prefix_cache()
    rig.add("early", ids)
    for _ in range(5):
        rig.step()
    assert rig.hits["early"] == 0
    rig.held_back = set()
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("warm", ids) == 6 * BLOCK
    assert_idle(rig)


def test_the_log_says_how_much_of_the_pool_is_ready(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    shake: Any = rig.workers[0].get_handshake_metadata()
    rig.config.parallel_config.world_size = 2
    fresh = LayerStreamConnector(rig.config, KVConnectorRole.SCHEDULER, rig.cache)
    ranks = [
        dataclasses.replace(shake.info, rank=rank, pool_slots=480 + rank, ready_slots=ready, pinned=True)
        for rank, ready in enumerate((64, 32))
    ]

    def report(ready: dict[int, int]) -> int:
        meta = WorkerReport(Report(ready_slots=ready))
        fresh.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
        assert fresh.has_pending_push_work() is False, "growth alone keeps no engine stepping"
        assert fresh.scheduler._coordinator is not None
        return fresh.scheduler._coordinator.pool_slots

    with caplog.at_level(logging.INFO, logger="vllm.layerstream"):
        fresh.set_xfer_handshake_metadata_pp_aware({(0, rank.rank): type(shake)(rank) for rank in ranks})
        assert re.search(
            r"pool 480 slots a rank \([0-9.]+ GiB, pinned; 32 ready, the rest follows in the background\), tiers none, "
            r"loads",
            caplog.text,
        )
        caplog.clear()
        assert [report(ready) for ready in ({0: 480}, {1: 96}, {1: 480})] == [32, 96, 480]
        report({1: 481})
    (line,) = [record.message for record in caplog.records]
    assert line == "LayerStream: all 480 slots of the pool are ready on every rank"


def test_a_pool_that_is_ready_at_once_is_told_of_as_such(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.layerstream"):
        rig = make_rig()
        rig.serve("cold", prompt(100))
    assert "GiB, not pinned), tiers none, loads" in caplog.text
    assert "ready" not in caplog.text


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_pools_that_grow_at_different_steps_on_two_ranks(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    pins = [FakePinner(), FakePinner()]
    unused = iter(pins)

    def pool_of_segments(**arguments: Any) -> HostPool:
        return HostPool(**{**arguments, "segment_bytes": 64 << 10, "pin": next(unused)})

    monkeypatch.setattr(assembly, "HostPool", pool_of_segments)
    rig = make_rig(ranks=2, options={"load_mode": mode, "host_gib": 0.0002})
    for pin in pins:
        pin.hold()
    coordinator = rig.connector.scheduler._coordinator
    pools = [worker.worker.engine.pool for worker in rig.workers]  # type: ignore[union-attr]
    assert coordinator is not None
    segment = pools[0].ready_slots
    assert coordinator.planned_slots == pools[0].slots == 4 * segment
    real_plan = coordinator.plan

    def plan(**step_of: bool) -> Any:
        step = real_plan(**step_of)
        pages = [first + count for job in step.jobs for first, count in job.pool_runs] if step is not None else []
        assert max(pages, default=0) <= min(pool.ready_slots for pool in pools) * 4, "a page that a rank has not ready"
        return step

    monkeypatch.setattr(coordinator, "plan", plan)
    seen = []
    for turn, (rank, segments) in enumerate([(0, 1), (0, 2), (0, 4), (1, 2), (1, 4)]):
        pins[rank].let(segments - pools[rank].ready_slots // segment)
        until(lambda pool=pools[rank], slots=segments * segment: pool.ready_slots == slots)  # type: ignore[misc]
        ids = prompt(segment * 4 * BLOCK, seed=turn)
        rig.serve(f"cold {turn}", ids)
        seen.append(coordinator.pool_slots // segment)
        assert rig.scheduler.reset_prefix_cache()
        assert rig.serve(f"warm {turn}", ids) > 0
        assert_idle(rig)
    assert seen == [1, 1, 1, 2, 4]
    assert coordinator.pool_used > 2 * segment, "nothing lies in the part that came last"


def test_an_idle_engine_finishes_its_saves(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.held_back = {0}
    rig.add("last", prompt(100))
    for _ in range(5):
        rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    assert rig.scheduler.has_requests(), "the engine would stop stepping with a report due"
    rig.held_back = set()
    rig.run()
    assert rig.connector.scheduler._coordinator.pool_used > 0
    assert_idle(rig)


@pytest.mark.parametrize(
    ("options", "policy"),
    [({}, AdaptiveInsertion), ({"eviction": "lru"}, LRU), ({"eviction": "adaptive"}, AdaptiveInsertion)],
)
def test_the_option_chooses_what_evicts(make_rig: MakeRig, options: dict[str, Any], policy: type[object]) -> None:
    coordinator = make_rig(options=options).connector.scheduler._coordinator
    assert coordinator is not None and coordinator._index is not None
    assert type(coordinator._index._policy) is policy


def test_decode_blocks_are_saved_unless_told_not_to(make_rig: MakeRig) -> None:
    for save_decode, hit in ((True, 5 * BLOCK), (False, 2 * BLOCK)):
        rig = make_rig(options={"save_decode": save_decode})
        ids = prompt(2 * BLOCK)
        rig.serve("cold", ids, max_tokens=3 * BLOCK + 5)
        assert rig.scheduler.reset_prefix_cache()
        assert rig.serve("next turn", ids + rig.outputs["cold"]) == hit


def test_a_full_pool_drops_saves_and_serves_on(make_rig: MakeRig) -> None:
    rig = make_rig(options={"host_gib": 0.0002})
    for index in range(12):
        rig.serve(f"r{index}", prompt(300, seed=index))
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", prompt(300, seed=11)) > 0
    assert_idle(rig)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
def test_a_second_parked_request_waits_and_then_hits_locally(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(options={"load_mode": mode})
    ids = prompt(150)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    rig.add("one", ids)
    rig.add("two", ids)
    rig.run()
    assert rig.hits["one"] == rig.hits["two"] == 9 * BLOCK
    loads = rig.connector.scheduler._coordinator.take_stats().hit_tokens
    assert loads == 9 * BLOCK
    assert_idle(rig)


@pytest.mark.parametrize("mode", ["layerwise", "parked"])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(make_rig: MakeRig, mode: str, seed: int) -> None:
    """Requests that share prefixes come, decode, are aborted and preempted; caches are reset; a rank lags behind."""
    dice = random.Random(seed)
    rig = make_rig(options={"load_mode": mode, "host_gib": 0.0008}, num_blocks=40, step_tokens=96, ranks=1 + seed % 2)
    stems = [prompt(dice.randrange(1, 220), seed=100 + i) for i in range(4)]
    alive: list[str] = []
    for turn in range(250):
        action = dice.random()
        if action < 0.35 and len(rig.scheduler.requests) < 8:
            stem = dice.choice(stems)
            ids = stem[: dice.randrange(1, len(stem) + 1)] + prompt(dice.randrange(1, 40), seed=dice.randrange(6))
            alive.append(f"r{turn}")
            rig.add(alive[-1], ids, max_tokens=dice.choice([1, 2, 40]))
        elif action < 0.42 and alive:
            rig.abort(alive.pop(dice.randrange(len(alive))))
        elif action < 0.47:
            rig.scheduler.reset_prefix_cache(reset_connector=dice.random() < 0.2)
        rig.held_back = {1} if dice.random() < 0.3 else set()
        rig.step()
    rig.held_back = set()
    rig.run()
    assert_idle(rig, num_blocks=40)
    hit_requests = sum(hit > 0 for hit in rig.hits.values())
    assert hit_requests > 5


def break_scatter(rig: SchedulerRig) -> None:
    """From here on every load of the first rank fails."""

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no such memory")

    engine = rig.workers[0].worker.engine
    assert engine is not None
    path: Any = engine._paths.load(1)
    path._kernels = path._kernels._replace(scatter_pages=broken)


def silence(rig: SchedulerRig) -> None:
    """From here on nothing is moved and nothing reported by the first rank."""
    engine = rig.workers[0].worker.engine
    assert engine is not None
    path: Any = engine._paths.load(1)
    path.load = lambda *_, **__: None
    engine.poll = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("fault", ["rank fails", "rank hangs"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_parked_load_is_never_served_as_if_it_had_arrived(
    make_rig: MakeRig, policy: str, fault: str, ranks: int
) -> None:
    rig = make_rig(options={"load_mode": "parked"}, ranks=ranks)
    rig.scheduler.recompute_kv_load_failures = policy == "recompute"
    ids = prompt(200)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    half = rig.connector.scheduler
    if fault == "rank fails":
        break_scatter(rig)
    else:
        silence(rig)
    rig.add("warm", ids)
    for step in range(40):
        if fault == "rank hangs" and step == 3:
            half._seconds += 100.0
        if not rig.step().num_scheduled_tokens:
            time.sleep(0.001)
    if policy == "fail":
        assert rig.requests["warm"].status is RequestStatus.FINISHED_ERROR
    else:
        assert rig.hits["warm"] == 0
        assert rig.outputs["warm"] == rig.outputs["cold"]
    # Nothing is offered any more: the next request is computed.
    rig.scheduler.reset_prefix_cache()
    rig.add("next", ids)
    for _ in range(10):
        rig.step()
    assert rig.outputs["next"] == rig.outputs["cold"]


def test_after_a_failed_save_requests_are_served_without_the_pool(make_rig: MakeRig) -> None:
    rig = make_rig()
    ids = prompt(100)
    rig.serve("saved", ids)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no such memory")

    engine = rig.workers[0].worker.engine
    assert engine is not None
    path: Any = engine._paths.save
    path._kernels = path._kernels._replace(gather_pages=broken)
    rig.serve("not saved", prompt(100, seed=5))
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", ids) == 0
    assert rig.outputs["again"] == rig.outputs["saved"]
    assert_idle(rig)


def test_a_long_step_does_not_expire_a_healthy_load(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(options={"load_mode": "parked"})
    ids = prompt(200)
    rig.serve("cold", ids)
    assert rig.scheduler.reset_prefix_cache()
    seconds = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr("layerstream.hooks.vllm.scheduler.time", clock)
    rig.held_back = {0}
    rig.add("warm", ids)
    for _ in range(5):
        rig.step()
        seconds[0] += 61.0
    rig.held_back = set()
    for _ in range(50):
        if not rig.step().num_scheduled_tokens:
            time.sleep(0.001)
    assert rig.hits["warm"] == 12 * BLOCK
    assert rig.outputs["warm"] == rig.outputs["cold"]


def test_blocks_another_connector_failed_to_load_are_not_published(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under MultiConnector: another connector wins the hit, its sync load fails, and vLLM ends the request."""
    rig = make_rig()
    rig.scheduler.recompute_kv_load_failures = False
    ids = prompt(200)
    bad: set[int] = set()
    real_match, real_alloc = rig.connector.get_num_new_matched_tokens, rig.connector.update_state_after_alloc
    real_schedule = rig.scheduler.schedule

    def match(request: Any, local: int) -> tuple[int | None, bool]:
        real_match(request, local)
        return 96, False

    def allocated(request: Any, blocks: Any, _: int) -> None:
        real_alloc(request, blocks, 0)

    def schedule() -> Any:
        output = real_schedule()
        bad.clear()
        if "failing" in output.num_scheduled_tokens:
            bad.update(rig.scheduler.kv_cache_manager.get_block_ids("failing")[0][:6])
        return output

    with monkeypatch.context() as other:
        other.setattr(rig.connector, "get_num_new_matched_tokens", match)
        other.setattr(rig.connector, "update_state_after_alloc", allocated)
        other.setattr(rig.workers[0], "get_block_ids_with_load_errors", lambda: set(bad))
        other.setattr(rig, "_check", lambda *_: None)
        other.setattr(rig.scheduler, "schedule", schedule)
        rig.add("failing", ids)
        for _ in range(5):
            rig.step()
    assert rig.requests["failing"].status is RequestStatus.FINISHED_ERROR
    rig.scheduler.reset_prefix_cache()
    assert rig.serve("next", ids) == 0


def test_a_long_local_hit_is_saved_a_few_blocks_a_step(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(step_tokens=512)
    coordinator = rig.connector.scheduler._coordinator
    assert coordinator is not None
    coordinator.set_slots(coordinator.pool_slots, backlog_blocks=3)
    ids = prompt(30 * BLOCK)
    rig.serve("first", ids)
    coordinator.reset()
    moved: list[int] = []
    real_plan = coordinator.plan

    def plan(**step_of: bool) -> Any:
        step = real_plan(**step_of)
        moved.append(sum(len(job.block_ids) for job in step.jobs) if step is not None else 0)
        return step

    monkeypatch.setattr(coordinator, "plan", plan)
    rig.serve("second", ids, max_tokens=15)
    assert 0 < max(moved) <= 3 + 1
    assert sum(moved) >= 30
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("third", ids) == 29 * BLOCK


def test_finished_requests_are_forgotten(make_rig: MakeRig) -> None:
    rig = make_rig()
    for index in range(5):
        rig.serve(f"r{index}", prompt(60, seed=index))
    rig.add("aborted", prompt(90, seed=9), max_tokens=20)
    rig.step()
    rig.abort("aborted")
    rig.run()
    half = rig.connector.scheduler
    assert half._requests == {}
    assert half._asked == {}
    assert half._coordinator is not None
    assert half._coordinator._requests == {}


@pytest.mark.parametrize(("role", "used"), [("kv_both", True), ("kv_producer", True), ("kv_consumer", False)])
def test_the_role_says_who_saves(make_rig: MakeRig, role: str, used: bool) -> None:
    rig = make_rig(kv_role=role)
    ids = prompt(100)
    rig.serve("cold", ids)
    assert rig.connector.scheduler._coordinator is not None
    assert (rig.connector.scheduler._coordinator.pool_used > 0) is used
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("again", ids) == (6 * BLOCK if role == "kv_both" else 0)
