from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from layerstream.errors import ConfigError
from layerstream.tiers import registry
from layerstream.tiers.base import Tier
from layerstream.tiers.registry import ENTRY_POINTS, parse_tiers, tier_types
from tests.rigs.memory_tier import MemoryTier


@dataclass
class EntryPoint:
    """What `importlib.metadata` tells of a tier that another distribution brings."""

    name: str
    loads: object
    value: str = "elsewhere:Tier"

    def load(self) -> object:
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    points = [EntryPoint("memory", MemoryTier), EntryPoint("memory-2", MemoryTier)]

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == ENTRY_POINTS == "layerstream.tiers"
        return [point for point in points if name in {None, point.name}]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return points


def test_no_tiers_are_no_tiers() -> None:
    assert parse_tiers([]) == ()


def test_an_entry_becomes_a_tier_with_its_options() -> None:
    (spec,) = parse_tiers([{"type": "memory", "capacity_bytes": 7}])
    assert isinstance(spec.tier, MemoryTier) and spec.tier.capacity_bytes == 7
    assert (spec.name, spec.write, spec.admission) == ("memory", True, "all")


def test_options_common_to_all_tiers_are_taken_out() -> None:
    (spec,) = parse_tiers([{"type": "memory", "write": False, "admission": "reused", "lookup_ms": 40}])
    assert (spec.write, spec.admission, spec.lookup_ms) == (False, "reused", 40)


def test_tiers_are_portable_together_or_not_at_all() -> None:
    assert not parse_tiers([{"type": "memory"}])[0].portable
    assert [spec.portable for spec in parse_tiers([{"type": "memory", "portable": True}] * 2)] == [True, True]
    assert not any(spec.portable for spec in parse_tiers([{"type": "memory", "portable": False}, {"type": "memory"}]))
    for first, second in ((True, False), (False, True)):
        entries = [{"type": "memory", "portable": first}, {"type": "memory", "portable": second}]
        with pytest.raises(
            ConfigError, match=rf"\[1\]\['portable'\] is {str(second).lower()}, and that of tiers\[0\] is"
        ):
            parse_tiers(entries)


def test_the_entries_given_stay_as_they_are() -> None:
    entry: Mapping[str, Any] = {"type": "memory", "write": True}
    parse_tiers([entry])
    assert entry == {"type": "memory", "write": True}


def test_names_are_unique_whatever_the_types_are_called() -> None:
    types = ["memory", "memory", "memory-2", "memory", "memory-2"]
    names = [spec.name for spec in parse_tiers([{"type": kind} for kind in types])]
    assert names[:2] == ["memory", "memory-2"] and len(set(names)) == 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"capacity_bytes": 7}, r"\['tiers'\]\[1\] needs a \"type\": one of disk, lmcache, memory"),
        ({"type": 3}, r"\[1\] needs a \"type\""),
        ({"type": "memroy"}, r"\[1\] \(memroy\): there is no such tier; did you mean 'memory'\? Installed: disk, "),
        ({"type": "zzzzzzz"}, r"\[1\] \(zzzzzzz\): there is no such tier\. Installed: disk, "),
        ({"type": "memory", "write": 1}, r"\[1\]\['write'\] got 1; allowed: true or false"),
        ({"type": "memory", "portable": "yes"}, r"\[1\]\['portable'\] got 'yes'; allowed: true or false"),
        ({"type": "memory", "admission": "some"}, r"\[1\]\['admission'\] got 'some'; allowed: all or reused or value"),
        ({"type": "memory", "lookup_ms": 0}, r"\[1\]\['lookup_ms'\] got 0; allowed: a number > 0"),
        ({"type": "memory", "lookup_ms": True}, r"\[1\]\['lookup_ms'\] got True"),
        ({"type": "memory", "lookup_ms": "1"}, r"\[1\]\['lookup_ms'\] got '1'"),
        ({"type": "memory", "size": 1}, r"\[1\] \(memory\): option 'size' is unknown\. Allowed"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tiers([{"type": "memory"}, entry])


def test_what_others_install_must_be_a_tier(installed: list[EntryPoint]) -> None:
    installed += [EntryPoint("text", "no class"), EntryPoint("dict", dict), EntryPoint("gone", ImportError("no such"))]
    for kind, message in (("text", "not a subclass of Tier"), ("dict", "not a subclass"), ("gone", "cannot be loaded")):
        with pytest.raises(ConfigError, match=message):
            parse_tiers([{"type": kind}])


def test_built_in_tiers_come_before_those_of_others(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("disk", MemoryTier))
    with pytest.raises(ConfigError, match=r"\(disk\)"):
        parse_tiers([{"type": "disk", "capacity_bytes": 1}])
    assert tier_types() == ["disk", "lmcache", "memory", "memory-2", "mooncake"]


@pytest.mark.parametrize("kind", ["disk", "lmcache", "mooncake"])
def test_built_in_tiers_are_there_and_say_what_they_need(kind: str) -> None:
    assert issubclass(registry._tier_class(kind), Tier)
    assert registry._tier_class(kind).kind == kind
    with pytest.raises(ConfigError):
        parse_tiers([{"type": kind}])
