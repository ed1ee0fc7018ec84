"""Several KV cache groups under vLLM's real scheduler: layers whose windows have passed most of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from layerstream.jobs import JobKind
from tests.rigs.scheduler_rig import BLOCK, Chunked, SchedulerRig, prompt

WINDOWS = [(40,), (None, 40), (40, None), (None, 16, 40), (24, 40), (None, Chunked(48)), (Chunked(64), 40)]
MakeRig = Callable[..., SchedulerRig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    with ExitStack() as stack:

        def make(windows: tuple[int | None, ...], **arguments: Any) -> SchedulerRig:
            options = {"host_gib": 1 / 64, "chunk_tokens": 4 * BLOCK, "staging_mib": 1, **arguments.pop("options", {})}
            rig = SchedulerRig(tmp_path, options=options, windows=windows, num_blocks=128, **arguments)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("load_mode", ["layerwise", "parked"])
@pytest.mark.parametrize("path", ["zero_copy", "staged", "batch_dma"])
def test_a_prompt_is_hit_whole_and_attention_reads_its_bytes(
    make_rig: MakeRig, windows: tuple[int | None, ...], load_mode: str, path: str
) -> None:
    rig = make_rig(windows, options={"load_mode": load_mode, "transfer_path": path, "verify": True})
    for length in (5 * BLOCK, 17 * BLOCK + 3):
        tokens = prompt(length, length)
        free = rig.free_blocks
        assert rig.serve(f"cold{length}", tokens) == 0
        assert rig.scheduler.reset_prefix_cache()
        assert rig.serve(f"warm{length}", tokens, max_tokens=20) == (length - 1) // BLOCK * BLOCK
        assert rig.free_blocks == free


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_hit_may_end_at_any_block_of_what_was_saved(make_rig: MakeRig, windows: tuple[int | None, ...]) -> None:
    rig = make_rig(windows, step_tokens=48)
    tokens = prompt(12 * BLOCK)
    rig.serve("cold", tokens)
    for blocks in range(1, 12):
        assert rig.scheduler.reset_prefix_cache()
        assert rig.serve(f"head{blocks}", [*tokens[: blocks * BLOCK], *prompt(40, seed=blocks)]) == blocks * BLOCK


def test_of_a_group_only_its_window_is_loaded(make_rig: MakeRig) -> None:
    rig = make_rig((None, 40))
    tokens = prompt(10 * BLOCK + 1)
    rig.serve("cold", tokens)
    assert rig.scheduler.reset_prefix_cache()
    rig.add("warm", tokens)
    output = rig.step()
    (job,) = output.kv_connector_metadata.plan.jobs
    assert job.kind is JobKind.LOAD
    assert [len(group.block_ids) for group in job.groups] == [10, 3]
    assert 0 not in job.all_block_ids, "vLLM's null block"
    whole = [first + i for first, count in job.pool_runs for i in range(count)]
    assert [first + i for first, count in job.others[0].pool_runs for i in range(count)] == whole[-3:]
    rig.run()


def test_a_prompt_that_vllm_has_in_part_is_hit_beyond_it(make_rig: MakeRig) -> None:
    rig = make_rig((None, 24), step_tokens=64)
    tokens = prompt(16 * BLOCK)
    rig.serve("cold", tokens)
    assert rig.scheduler.reset_prefix_cache()
    rig.serve("head", tokens[: 6 * BLOCK + 1])
    assert rig.serve("whole", [*tokens, 5]) == 16 * BLOCK


def test_what_windows_have_passed_is_not_saved_later(make_rig: MakeRig) -> None:
    rig = make_rig((None, 24), options={"host_gib": 0.00005})
    tokens = prompt(12 * BLOCK)
    rig.serve("cold", tokens)
    for seed in range(1, 4):
        rig.serve(f"filler{seed}", prompt(12 * BLOCK, seed=seed))
    stats = rig.connector.scheduler._coordinator.take_stats()
    assert stats.evicted_chunks
    assert rig.serve("again", [*tokens, *prompt(3 * BLOCK, seed=9)]) > 0, "vLLM has it itself"
    assert rig.connector.scheduler._coordinator.take_stats().dropped_blocks
    assert rig.scheduler.reset_prefix_cache()
    assert rig.serve("then", [*tokens, 1]) == 0


@pytest.mark.parametrize("windows", [(None, 40), (24,)], ids=str)
def test_ranks_and_preemptions(make_rig: MakeRig, windows: tuple[int | None, ...]) -> None:
    rig = make_rig(windows, ranks=2)
    for round_ in range(3):
        for name in range(6):
            rig.add(f"r{round_}.{name}", prompt(17 * BLOCK, seed=name), max_tokens=40)
        rig.run()
        assert rig.scheduler.reset_prefix_cache()
    assert sum(rig.hits[f"r2.{name}"] for name in range(6)) >= 6 * 16 * BLOCK


def test_a_hit_that_ends_with_a_chunk_loads_nothing_for_its_group(make_rig: MakeRig) -> None:
    rig = make_rig((None, Chunked(4 * BLOCK)))
    tokens = prompt(8 * BLOCK + 1)
    rig.serve("cold", tokens)
    assert rig.scheduler.reset_prefix_cache()
    rig.add("warm", tokens)
    output = rig.step()
    (job,) = output.kv_connector_metadata.plan.jobs
    assert [len(group.block_ids) for group in job.groups] == [8, 0]
    rig.run()
    assert rig.hits["warm"] == 8 * BLOCK
