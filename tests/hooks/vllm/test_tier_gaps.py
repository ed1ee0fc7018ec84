"""Objects that a lookup promised and that are gone, or damaged, when their bytes are wanted: what lies before them is
the hit, what lies behind them is placed nowhere, and the request is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from layerstream.errors import TierError
from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, Found, Item
from layerstream.tiers.disk.tier import DiskTier
from tests.hooks.vllm.test_tiers import assert_idle, served, whole_hit
from tests.rigs.installed_tiers import installed, write_weights
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.scheduler_rig import BLOCK, SchedulerRig, prompt
from tests.rigs.tier_faults import FaultyTier

CHUNK = 4
OBJECTS = 7
PROMPT = prompt(OBJECTS * CHUNK * BLOCK + 1)

MakeRig = Callable[..., SchedulerRig]


@pytest.fixture
def make_tiered(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes engines over tiers, which are given in the order they are to be asked."""
    write_weights(tmp_path)
    with ExitStack() as stack:

        def make(*tiers: FaultyTier, ranks: int = 1) -> SchedulerRig:
            named = {f"tier{place}": tier for place, tier in enumerate(tiers)}
            options = {"host_gib": 1 / 64, "chunk_tokens": CHUNK * BLOCK, "tiers": [{"type": name} for name in named]}
            with installed(named):
                rig = SchedulerRig(tmp_path, options={**options, "staging_mib": 1}, ranks=ranks)
            stack.callback(rig.close)
            return rig

        yield make


class Loses:
    """A tier that keeps some objects of each chain that it is asked for, and loses one right after its answer."""

    def __init__(self, tier: MemoryTier, keeps: range, loses: int | None = None, rank: int | None = None) -> None:
        self.tier, self.keeps, self.loses, self.rank = tier, keeps, loses, rank

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        chain: tuple[TierObject, ...] = args[0] if what == "find" else ()
        for place, one in enumerate(chain):
            if place not in self.keeps:
                self.tier.kept.pop(one.key, None)
        answer = call()
        if self.loses is not None and len(chain) > self.loses:
            ranks = self.tier.kept.get(chain[self.loses].key, {})
            for rank in list(ranks) if self.rank is None else [self.rank]:
                ranks.pop(rank, None)
            if not ranks:
                self.tier.kept.pop(chain[self.loses].key, None)
        return answer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("place", "loses", "usable"), [(0, 2, 2), (1, 6, 6), (0, 0, 0), (1, 3, 3), (0, None, 7)], ids=str
)
def test_a_gap_in_a_hit_over_two_tiers_ends_it(
    make_tiered: MakeRig, ranks: int, place: int, loses: int | None, usable: int
) -> None:
    tiers = [FaultyTier(), FaultyTier()]
    cold = make_tiered(*tiers, ranks=ranks)
    served(cold, "a", PROMPT)
    keeps = (range(3), range(3, OBJECTS))
    for number, tier in enumerate(tiers):
        tier.index = Loses(tier.inner, keeps[number], loses if number == place else None)
    rig = make_tiered(*tiers, ranks=ranks)
    assert served(rig, "a", PROMPT) == usable * CHUNK * BLOCK
    assert rig.outputs["a"] == cold.outputs["a"]
    for tier in tiers:
        tier.index = Loses(tier.inner, range(OBJECTS))
    assert_idle(rig, tiers[0].inner)
    assert served(make_tiered(*tiers, ranks=ranks), "a", PROMPT) == whole_hit(len(PROMPT))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_lost_most_decides(make_tiered: MakeRig, rank: int) -> None:
    tier = FaultyTier()
    served(make_tiered(tier, ranks=3), "a", PROMPT)
    for loses in (5, 2):
        tier.index = Loses(tier.inner, range(OBJECTS), loses, rank)
        rig = make_tiered(tier, ranks=3)
        assert served(rig, "a", PROMPT) == loses * CHUNK * BLOCK
        assert_idle(rig, tier.inner)


def deleted(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def replaced_by_another(path: Path) -> None:
    other = next(each for each in sorted(path.parents[1].rglob("*.safetensors")) if each != path)
    path.write_bytes(other.read_bytes())


def not_a_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


class Fault:
    """Does something to the file of the third object of each chain, right after a lookup found it."""

    def __init__(self, folder: Path, act: Callable[[Path], None]) -> None:
        self.folder, self.act, self.acted = folder, act, 0

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        answer = call()
        if what == "find" and len(args[0]) > 2 and cast(Found, answer).present[2]:
            for path in self.folder.rglob(f"{args[0][2].key.hex()}.*.safetensors"):
                self.act(path)
                self.acted += 1
        return answer


@pytest.mark.parametrize("act", [deleted, cut_short, emptied, flipped, replaced_by_another, not_a_file])
def test_a_file_that_a_lookup_found_and_a_read_does_not_is_computed(
    make_tiered: MakeRig, tmp_path_factory: pytest.TempPathFactory, act: Callable[[Path], None]
) -> None:
    folder = tmp_path_factory.mktemp("tier") / "kv"
    tier = FaultyTier(cast(MemoryTier, DiskTier.parse({"path": str(folder), "gib": 0.1})))
    cold = make_tiered(tier)
    served(cold, "a", PROMPT)
    fault = tier.index = Fault(folder, act)
    rig = make_tiered(tier)
    assert served(rig, "a", PROMPT) == 2 * CHUNK * BLOCK
    assert fault.acted == 1
    assert rig.outputs["a"] == cold.outputs["a"]
    tier.index = Fault(folder, lambda _: None)
    again = make_tiered(tier)
    whole = act is not not_a_file
    assert served(again, "b", PROMPT) == (whole_hit(len(PROMPT)) if whole else 2 * CHUNK * BLOCK)
    assert served(again, "c", prompt(100, seed=3)) == 0, "the engine lives"


class Unreadable:
    """Reads fail from the third object on."""

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if what != "read":
            return call()
        batch: Batch = args[0]
        good: list[Item] = [item for item in batch.items if item.object.start < 2 * CHUNK]
        if len(good) < len(batch.items):
            raise TierError("input/output error")
        return call()


def test_a_tier_whose_reads_fail_gives_at_most_what_it_had_read(make_tiered: MakeRig) -> None:
    tier = FaultyTier()
    served(make_tiered(tier), "a", PROMPT)
    tier.store = Unreadable()
    rig = make_tiered(tier)
    assert served(rig, "a", PROMPT) <= 2 * CHUNK * BLOCK
    assert served(rig, "b", prompt(100, seed=3)) == 0
    assert_idle(rig, tier.inner)
