"""The options of the connector, read from vLLM's `kv_connector_extra_config`.

The mapping arrives through JSON, so values are JSON types, and each is checked strictly: a bool is no number, "true" is
no bool. Every key in it is ours: vLLM adds keys of its own only for connectors it picks itself, and MultiConnector
hands each child the child's own mapping. A key we do not know is therefore a mistake, never something to ignore.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from layerstream.errors import ConfigError

_SOURCE = "LayerStream: kv_connector_extra_config"
_NAMESPACE_CHARS = 128

LoadMode = Literal["auto", "layerwise", "parked"]
TransferPathName = Literal["auto", "staged", "zero_copy", "batch_dma"]
Recompute = Literal["auto", "never"]
InGraphWaits = Literal["off", "flags", "events"]
Eviction = Literal["adaptive", "lru"]


def _option(default: Any, allowed: str, accepts: Callable[[Any], bool]) -> Any:
    """A field with its rule. `allowed` completes the sentence "allowed: ..." and heads the README's table."""
    return field(default=default, metadata={"allowed": allowed, "accepts": accepts})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int with no float near it
        return False


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_namespace(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _NAMESPACE_CHARS and value.isprintable()


def _is_absolute_path(value: object) -> bool:
    return isinstance(value, str) and Path(value).is_absolute() and "\0" not in value


def _is_tiers(value: object) -> bool:
    # What an object may say is its tier's business (`layerstream.tiers.registry.parse_tiers`).
    return isinstance(value, (list, tuple)) and all(isinstance(tier, Mapping) and "type" in tier for tier in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Options of one engine, checked when made.

    Raises:
        ConfigError: one or more values cannot be used; every one of them is named.
    """

    host_gib: float | None = _option(
        None, "a number > 0 and <= 1048576, or null", lambda v: v is None or (_is_number(v) and 0 < v <= 1 << 20)
    )
    """Host memory for the pool in GiB, per rank; null chooses at start from the memory that is available."""
    chunk_tokens: int = _option(256, "an integer >= 1", lambda v: _is_int(v) and v >= 1)
    """Tokens of one prefix that are kept and evicted together, rounded down to whole blocks, never below one."""
    load_mode: LoadMode = _option(
        "auto",
        " or ".join(f'"{mode}"' for mode in get_args(LoadMode)),
        lambda v: isinstance(v, str) and v in get_args(LoadMode),
    )
    """Hide each layer's load behind compute (layerwise), or park the request; auto decides for each hit, by rates."""
    recompute: Recompute = _option(
        "auto",
        " or ".join(f'"{way}"' for way in get_args(Recompute)),
        lambda v: isinstance(v, str) and v in get_args(Recompute),
    )
    """Compute, in whole or in part, what measured rates say loading would bring later; needs load_mode auto."""
    save_decode: bool = _option(True, "true or false", _is_bool)
    """Save blocks that fill while a request decodes, as well as blocks of its prompt."""
    namespace: str = _option("", f"a string of at most {_NAMESPACE_CHARS} printable characters", _is_namespace)
    """Part of every key: engines with different namespaces share nothing; it is hashed, never used as a path."""
    tiers: tuple[Mapping[str, Any], ...] = _option((), 'a list of objects, each with a "type"', _is_tiers)
    """Where chunks go that outlive the host pool, in the order they are asked: see Tiers below."""
    tenant_share: float | None = _option(
        None, "a number > 0 and <= 1, or null", lambda v: v is None or (_is_number(v) and 0 < v <= 1)
    )
    """Largest part of the pool that requests of one cache salt may fill; null sets no limit."""
    eviction: Eviction = _option(
        "adaptive",
        " or ".join(f'"{policy}"' for policy in get_args(Eviction)),
        lambda v: isinstance(v, str) and v in get_args(Eviction),
    )
    """How a full pool forgets: by last use (lru), or so too, but most new prompts early where not all can be kept."""
    require_piecewise: bool = _option(False, "true or false", _is_bool)
    """Ask vLLM for PIECEWISE CUDA graphs only; not needed for correctness."""
    log_interval_s: float = _option(10.0, "a number >= 0", lambda v: _is_number(v) and v >= 0)
    """Seconds between lines about hits and transfers; 0 logs none."""
    transfer_path: TransferPathName = _option(
        "auto",
        " or ".join(f'"{path}"' for path in get_args(TransferPathName)),
        lambda v: isinstance(v, str) and v in get_args(TransferPathName),
    )
    """How loads move: device rings, a kernel reading the pool, batched copies; auto takes what measures fastest."""
    staging_mib: int = _option(64, "an integer >= 1", lambda v: _is_int(v) and v >= 1)
    """Device memory in MiB for the rings of staged transfers, half for loads and half for saves."""
    max_copy_sms: int | None = _option(None, "an integer >= 1, or null", lambda v: v is None or (_is_int(v) and v >= 1))
    """Most thread blocks a copy kernel may occupy; null is 8 across the link, 512 inside the GPU."""
    layers_per_gate: int | None = _option(
        None, "an integer >= 1, or null", lambda v: v is None or (_is_int(v) and v >= 1)
    )
    """Layers that travel and are waited for together; null groups only what is small beside its submission."""
    in_graph_waits: InGraphWaits = _option(
        "off",
        " or ".join(f'"{way}"' for way in get_args(InGraphWaits)),
        lambda v: isinstance(v, str) and v in get_args(InGraphWaits),
    )
    """Experimental, GPU: waits for each layer inside FULL CUDA graphs, by words in memory or external events."""
    graph_loads: bool = _option(False, "true or false", _is_bool)
    """Experimental, GPU: submit a load as one captured graph that reads its block list from device memory."""
    sanitize: bool = _option(False, "true or false", _is_bool)
    """Follow every access and every event, and stop at two accesses that nothing orders; slow, for debugging."""
    verify: bool = _option(False, "true or false", _is_bool)
    """Compare a fingerprint of every block saved and restored; slow, for debugging."""
    trace_dir: str | None = _option(None, "an absolute path, or null", lambda v: v is None or _is_absolute_path(v))
    """Folder that gets a timeline of every layerwise load; null writes none."""

    def __post_init__(self) -> None:
        _refuse(_faults({option.name: getattr(self, option.name) for option in fields(self)}))
        # JSON writes 10 and 10.0 alike, so an int given for a float becomes one, once, here.
        object.__setattr__(self, "tiers", tuple(dict(tier) for tier in self.tiers))
        for name in ("host_gib", "tenant_share", "log_interval_s"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else float(value))

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any] | None) -> StreamConfig:
        """Read vLLM's `kv_connector_extra_config`; None and missing keys mean defaults.

        Raises:
            ConfigError: unknown keys or values that cannot be used; one line for each.
        """
        if extra is None:
            return cls()
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{_SOURCE} must be an object of options, got {_shown(extra)}")
        _refuse(_faults(extra))
        return cls(**extra)

    def chunk_blocks(self, block_tokens: int) -> int:
        """Blocks in one chunk, at least 1, where a block holds `block_tokens` >= 1 tokens."""
        return max(1, self.chunk_tokens // block_tokens)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _faults(values: Mapping[str, Any]) -> list[str]:
    """One line per key that is unknown or whose value breaks its rule, in the order given."""
    options = {option.name: option for option in fields(StreamConfig)}
    lines = []
    for key, value in values.items():
        option = options.get(key)
        if option is None:
            near = difflib.get_close_matches(str(key), options, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            lines.append(f"[{key!r}] is unknown{hint} Valid keys: {', '.join(options)}")
        elif not option.metadata["accepts"](value):
            lines.append(f"[{key!r}] got {_shown(value)}; allowed: {option.metadata['allowed']}")
    return lines


def _refuse(lines: list[str]) -> None:
    if lines:
        raise ConfigError("\n".join(f"{_SOURCE}{line}" for line in lines))


def options_table() -> str:
    """The options as a Markdown table: key, default (as JSON), what is allowed, meaning.

    The meaning is the docstring under each field, read from this module's source so that it is written once.

    Raises:
        OSError: the source is not installed beside the byte code.
    """
    body = ast.parse(inspect.getsource(StreamConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {
        named.target.id: note.value.value
        for named, note in zip(body.body, body.body[1:], strict=False)
        if isinstance(named, ast.AnnAssign)
        and isinstance(named.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }
    rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for option in fields(StreamConfig):
        assert option.default is not MISSING
        rows.append(
            f"| `{option.name}` | `{json.dumps(option.default)}` | {option.metadata['allowed']} "
            f"| {meanings[option.name]} |"
        )
    return "\n".join(rows) + "\n"
