"""From the option `tiers` to tiers: built in, or installed by others under the entry-point group."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from itertools import count
from typing import Any, Literal, cast, get_args

from layerstream.errors import ConfigError
from layerstream.tiers.base import Tier

ENTRY_POINTS = "layerstream.tiers"
"""Entry-point group of tiers that other distributions bring: name = "type", object = a subclass of `Tier`."""

_BUILT_IN = {
    "disk": "layerstream.tiers.disk.tier:DiskTier",
    "mooncake": "layerstream.tiers.mooncake.tier:MooncakeTier",
    "lmcache": "layerstream.tiers.lmcache.tier:LMCacheTier",
}

Admission = Literal["all", "reused", "value"]
LOOKUP_MS = 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One entry of the option `tiers`."""

    tier: Tier
    name: str
    """Unique in the engine, for logs and metrics: the type, with a number from the second of its kind on."""
    write: bool
    """Whether objects are written to it, or only read."""
    admission: Admission
    """What is written: all that is saved, what was wanted a second time, or what measured rates say is worth it."""
    portable: bool = False
    """Whether objects are in canonical form (`layerstream.canonical`), for engines that lay KV out otherwise."""
    lookup_ms: float = LOOKUP_MS
    """Milliseconds that a waiting request gives the tier to say what it holds; an answer that comes later is a miss."""


def parse_tiers(entries: Sequence[Mapping[str, Any]]) -> tuple[TierSpec, ...]:
    """Read the option `tiers`.

    Raises:
        ConfigError: an entry cannot be used; the message names it.
    """
    specs: list[TierSpec] = []
    for place, entry in enumerate(entries):
        where = f"LayerStream: kv_connector_extra_config['tiers'][{place}]"
        options = dict(entry)
        kind = options.pop("type", None)
        write = options.pop("write", True)
        admission = options.pop("admission", "all")
        portable = options.pop("portable", False)
        lookup_ms = options.pop("lookup_ms", LOOKUP_MS)
        if not isinstance(kind, str):
            raise ConfigError(f'{where} needs a "type": one of {", ".join(tier_types())}')
        if not isinstance(write, bool):
            raise ConfigError(f"{where}['write'] got {write!r}; allowed: true or false")
        if not isinstance(portable, bool):
            raise ConfigError(f"{where}['portable'] got {portable!r}; allowed: true or false")
        if specs and portable is not specs[0].portable:
            raise ConfigError(
                f"{where}['portable'] is {str(portable).lower()}, and that of tiers[0] is not; it must be the same for "
                "all tiers of an engine, since each prefix has one name"
            )
        if admission not in get_args(Admission):
            raise ConfigError(f"{where}['admission'] got {admission!r}; allowed: {' or '.join(get_args(Admission))}")
        if isinstance(lookup_ms, bool) or not isinstance(lookup_ms, (int, float)) or not 0 < lookup_ms <= 60_000:
            raise ConfigError(f"{where}['lookup_ms'] got {lookup_ms!r}; allowed: a number > 0 and <= 60000")
        try:
            tier = _tier_class(kind).parse(options)
        except ConfigError as error:
            raise ConfigError(f"{where} ({kind}): {error}") from error
        names = {spec.name for spec in specs}
        name = next(each for each in _names(kind) if each not in names)
        specs.append(
            TierSpec(
                tier=tier,
                name=name,
                write=write,
                admission=cast(Admission, admission),
                portable=portable,
                lookup_ms=lookup_ms,
            )
        )
    return tuple(specs)


def tier_types() -> list[str]:
    """Names that "type" may have on this installation."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _names(kind: str) -> Iterator[str]:
    yield kind
    yield from (f"{kind}-{number}" for number in count(2))


def _tier_class(kind: str) -> type[Tier]:
    if kind in _BUILT_IN:
        module, name = _BUILT_IN[kind].split(":")
        return cast(type[Tier], getattr(import_module(module), name))
    for entry in entry_points(group=ENTRY_POINTS, name=kind):
        try:
            found = entry.load()
        except Exception as error:
            raise ConfigError(
                f"entry point {entry.value} of group {ENTRY_POINTS} cannot be loaded: {error!r}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, Tier)):
            raise ConfigError(f"entry point {entry.value} of group {ENTRY_POINTS} is not a subclass of Tier")
        return found
    near = difflib.get_close_matches(kind, tier_types(), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"there is no such tier{hint} Installed: {', '.join(tier_types())}")
