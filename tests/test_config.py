"""Options: every key, every kind of bad value, and messages that name the fault and the way out."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

import pytest

from layerstream import config
from layerstream.config import StreamConfig, options_table
from layerstream.errors import ConfigError

KEYS = [field.name for field in dataclasses.fields(StreamConfig)]

GOOD: dict[str, list[Any]] = {
    "host_gib": [None, 0.5, 4, 2.0],
    "chunk_tokens": [1, 256, 100_000],
    "load_mode": ["auto", "layerwise", "parked"],
    "recompute": ["auto", "never"],
    "save_decode": [True, False],
    "namespace": ["", "team a/β", "x" * 128],
    "tiers": [[], [{"type": "disk"}], ({"type": "a"}, {"type": "b", "x": 1})],
    "tenant_share": [None, 0.25, 1, 1.0, 1e-9],
    "eviction": ["adaptive", "lru"],
    "require_piecewise": [True, False],
    "log_interval_s": [0, 0.25, 60],
    "transfer_path": ["auto", "staged", "zero_copy", "batch_dma"],
    "staging_mib": [1, 64],
    "max_copy_sms": [None, 1, 132],
    "layers_per_gate": [None, 1, 8],
    "in_graph_waits": ["off", "flags", "events"],
    "graph_loads": [True, False],
    "sanitize": [True, False],
    "verify": [True, False],
    "trace_dir": [None, "/tmp/traces"],
}
NUMBERS_REFUSED = [True, False, "1", float("nan"), float("inf"), -float("inf"), 10**400, -1, [], {}]
BAD: dict[str, list[Any]] = {
    "host_gib": [*NUMBERS_REFUSED, 0, 0.0, 1e300, 1048577],
    "chunk_tokens": [*NUMBERS_REFUSED[:6], 0, -1, 256.0, None, []],
    "load_mode": ["Auto", "", None, True, 0, ["auto"], {}],
    "recompute": ["always", "", None, True, 0, ["auto"], {}],
    "save_decode": ["true", 1, 0, None, []],
    "namespace": ["x" * 129, "a\nb", "a\0b", "\x7f", "\ud800", None, 7, []],
    "tiers": [None, {}, {"type": "disk"}, ["disk"], [{}], [{"path": "/kv"}], "disk"],
    "tenant_share": [*NUMBERS_REFUSED, 0, 0.0, 1.0001, 2],
    "eviction": ["LRU", "", None, True, ["lru"]],
    "require_piecewise": ["false", 1, None],
    "log_interval_s": [*NUMBERS_REFUSED, None],
    "transfer_path": ["zero-copy", "", None, True, 0, ["auto"]],
    "staging_mib": [0, -1, 1.5, 64.0, True, "64", None],
    "max_copy_sms": [0, -1, 1.5, True, "8", []],
    "layers_per_gate": [0, -1, 2.0, True, "auto"],
    "in_graph_waits": ["on", "", None, True, False],
    "graph_loads": ["yes", 1, None],
    "sanitize": ["yes", 1, None],
    "verify": ["yes", 1, None],
    "trace_dir": ["", "traces", "./traces", "~/traces", "/tmp/\0", 5, False, []],
}


def cases(table: Mapping[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(key, value, id=f"{key}-{ascii(value)[:20]}") for key, values in table.items() for value in values
    ]


def test_tables_of_this_test_cover_every_option() -> None:
    assert list(GOOD) == list(BAD) == KEYS


@pytest.mark.parametrize("extra", [None, {}])
def test_nothing_given_means_defaults(extra: dict[str, Any] | None) -> None:
    assert dataclasses.asdict(StreamConfig.from_extra(extra)) == {
        "host_gib": None,
        "chunk_tokens": 256,
        "load_mode": "auto",
        "recompute": "auto",
        "save_decode": True,
        "namespace": "",
        "tiers": (),
        "tenant_share": None,
        "eviction": "adaptive",
        "require_piecewise": False,
        "log_interval_s": 10.0,
        "transfer_path": "auto",
        "staging_mib": 64,
        "max_copy_sms": None,
        "layers_per_gate": None,
        "in_graph_waits": "off",
        "graph_loads": False,
        "sanitize": False,
        "verify": False,
        "trace_dir": None,
    }


@pytest.mark.parametrize(("key", "value"), cases(GOOD))
def test_good_value_is_taken(key: str, value: Any) -> None:
    taken = StreamConfig.from_extra(json.loads(json.dumps({key: value})))
    assert taken == dataclasses.replace(StreamConfig(), **{key: value})
    assert getattr(taken, key) == (tuple(value) if key == "tiers" else value)


@pytest.mark.parametrize(("key", "value"), [("host_gib", 3), ("tenant_share", 1), ("log_interval_s", 3)])
def test_int_for_a_float_becomes_a_float(key: str, value: int) -> None:
    assert type(getattr(StreamConfig.from_extra({key: value}), key)) is float


@pytest.mark.parametrize(("key", "value"), cases(BAD))
@pytest.mark.parametrize("direct", [False, True], ids=["from_extra", "constructor"])
def test_bad_value_is_refused(key: str, value: Any, direct: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        StreamConfig(**{key: value}) if direct else StreamConfig.from_extra({key: value})
    message = str(caught.value)
    assert message.startswith(f"LayerStream: kv_connector_extra_config[{key!r}] got ")
    assert f"({type(value).__name__}); allowed: " in message
    assert message.count("\n") == 0 and len(message) < 250


def test_message_shows_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        StreamConfig.from_extra({"load_mode": "eager"})
    assert str(caught.value) == (
        "LayerStream: kv_connector_extra_config['load_mode'] got 'eager' (str); "
        'allowed: "auto" or "layerwise" or "parked"'
    )


@pytest.mark.parametrize(
    ("key", "nearest"), [("hostgib", "host_gib"), ("chunk_size", "chunk_tokens"), ("Verify", "verify")]
)
def test_unknown_key_names_the_nearest_and_all(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StreamConfig.from_extra({key: 1})
    assert str(caught.value) == (
        f"LayerStream: kv_connector_extra_config[{key!r}] is unknown; did you mean {nearest!r}? "
        f"Valid keys: {', '.join(KEYS)}"
    )


@pytest.mark.parametrize("key", ["connectors", "cpu_bytes_to_use", "", 7])
def test_key_near_nothing_gets_no_misleading_hint(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"is unknown\. Valid keys: host_gib, "):
        StreamConfig.from_extra({key: 1})


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        StreamConfig.from_extra({"host_gib": -1, "chunk_tokens": 16, "verfy": True, "staging_mib": None})
    lines = str(caught.value).splitlines()
    assert [line.partition("]")[0] for line in lines] == [
        f"LayerStream: kv_connector_extra_config[{key!r}" for key in ("host_gib", "verfy", "staging_mib")
    ]


@pytest.mark.parametrize("extra", ["{}", [], 5])
def test_extra_must_be_a_mapping(extra: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object of options, got "):
        StreamConfig.from_extra(extra)


@pytest.mark.parametrize(
    ("chunk_tokens", "block_tokens", "blocks"),
    [(256, 16, 16), (256, 256, 1), (255, 256, 1), (1, 128, 1), (256, 100, 2), (511, 256, 1), (512, 256, 2)],
)
def test_chunk_is_whole_blocks(chunk_tokens: int, block_tokens: int, blocks: int) -> None:
    assert StreamConfig(chunk_tokens=chunk_tokens).chunk_blocks(block_tokens) == blocks


def test_values_cannot_be_changed_or_added() -> None:
    made = StreamConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.verify = True  # type: ignore[misc]
    assert not hasattr(made, "__dict__")


def test_table_has_one_full_row_per_option() -> None:
    header, rule, *rows = options_table().splitlines()
    assert (header, rule) == ("| option | default | allowed | meaning |", "|---|---|---|---|")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == [f"`{key}`" for key in KEYS]
    for name, default, allowed, meaning in cells:
        value = json.loads(default.strip("`"))
        assert StreamConfig.from_extra({name.strip("`"): value}) == StreamConfig()
        assert allowed and meaning.endswith(".")


def test_every_field_is_followed_by_its_docstring() -> None:
    (body,) = ast.parse(inspect.getsource(config.StreamConfig)).body
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(statement)
            assert "\n" not in str(after.value.value)
