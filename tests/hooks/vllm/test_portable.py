"""Portable chunks under vLLM's real scheduler: one engine saves, another with other pages or ranks loads."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from layerstream.canonical import RowForm
from layerstream.errors import ConfigError
from layerstream.head_groups import HeadGroups
from layerstream.hooks.vllm import portable
from layerstream.hooks.vllm.compat import CacheGroups
from layerstream.tiers.objects import parse_header
from tests.hooks.vllm.test_tiers import served
from tests.rigs.installed_tiers import write_weights
from tests.rigs.portable_rig import Layer, PortableRig
from tests.rigs.scheduler_rig import prompt

TOKENS = 300
CHUNK = 64

Make = Callable[..., PortableRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes engines of one model over one folder of a disk tier."""
    model, folder = tmp_path / "model", tmp_path / "tier"
    model.mkdir()
    write_weights(model)
    with ExitStack() as stack:

        def engine(
            *, portable: bool = True, tiers: list[dict[str, Any]] | None = None, **arguments: Any
        ) -> PortableRig:
            disk = {"type": "disk", "path": str(folder), "gib": 1, "portable": portable, "lookup_ms": 20_000}
            options = {"host_gib": 1 / 64, "chunk_tokens": CHUNK, "staging_mib": 1, "tiers": tiers or [disk]}
            rig = PortableRig(model, options=options, **arguments)
            stack.callback(rig.close)
            return rig

        yield engine


WRITERS: dict[str, dict[str, Any]] = {
    "tokens first": {},
    "heads first": {"memory": "bhn"},
    "heads outermost": {"memory": "hbn"},
    "two ranks": {"ranks": 2},
    "four ranks": {"ranks": 4, "memory": "bhn"},
    "long blocks": {"block": 32, "memory": "bhn"},
    "longer blocks on two ranks": {"block": 64, "ranks": 2},
    "another backend": {"backend": "TRITON_ATTN"},
    "two groups": {"windows": (None, None), "ranks": 2},
}


def whole_hit(rig: PortableRig) -> int:
    return (TOKENS - 1) // rig.block * rig.block


@pytest.mark.parametrize("name", WRITERS)
def test_an_engine_serves_what_another_saved(make: Make, name: str) -> None:
    first = make(**WRITERS[name])
    assert served(first, "a", prompt(TOKENS)) == 0
    for reader in (name, "tokens first", "longer blocks on two ranks"):
        second = make(**WRITERS[reader])
        assert served(second, "b", prompt(TOKENS)) == min(whole_hit(first), whole_hit(second)), reader
        assert second.outputs["b"] == first.outputs["a"]


def test_the_log_names_what_is_kept_where(make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    setups: list[dict[str, Any]] = [{}, {"ranks": 2, "block": 32}]
    with caplog.at_level(logging.INFO, logger="vllm.layerstream"):
        for setup in setups:
            served(make(**setup), "a", prompt(TOKENS))
    names = re.findall(r"at most 1 GiB \(portable\), .*, namespace ([0-9a-f]{12})", caplog.text)
    kept = {parse_header(file.read_bytes()).namespace[:12] for file in (tmp_path / "tier").rglob("*.safetensors")}
    assert {*names} == kept and len(kept) == 1


def test_windows_and_full_attention_are_read_by_other_ranks(make: Make) -> None:
    assert served(make(windows=(None, 48), ranks=2), "a", prompt(TOKENS)) == 0
    assert served(make(windows=(None, 48), ranks=4, memory="bhn"), "b", prompt(TOKENS)) >= 256


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_latent_is_shared_by_engines_with_any_number_of_ranks(make: Make, tmp_path: Path, replicas: int) -> None:
    """Ranks with the same KV have one pool, or one each where they do not reach each other's memory."""
    ranks = {"latent": True, "ranks": 2, "replicas": replicas}
    first = make(**ranks)
    assert served(first, "a", prompt(TOKENS)) == 0
    numbers = {file.name.split(".")[1] for file in (tmp_path / "tier").rglob("*.safetensors")}
    assert numbers == {"0"}
    for setup in ({"latent": True, "block": 32}, ranks):
        assert served(second := make(**setup), "b", prompt(TOKENS)) == 288
        assert second.outputs["b"] == first.outputs["a"]


def test_engines_that_differ_in_what_counts_share_nothing(make: Make, tmp_path: Path) -> None:
    served(first := make(), "a", prompt(TOKENS))
    assert served(first, "other", prompt(TOKENS, seed=1)) == 0
    assert served(make(portable=False), "b", prompt(TOKENS)) == 0
    write_weights(tmp_path / "model", b"abce")
    assert served(make(memory="bhn"), "c", prompt(TOKENS)) == 0


def test_engines_without_the_option_share_only_with_their_like(make: Make) -> None:
    served(make(portable=False), "a", prompt(TOKENS))
    assert served(make(portable=False), "b", prompt(TOKENS)) == 288
    assert served(make(portable=False, ranks=2), "c", prompt(TOKENS)) == 0


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({"isa": "vec16"}, "pages are packed for the instruction set vec16"),
        ({"backend": "ROCM_ATTN"}, "its attention backend ROCM_ATTN packs its KV in its own way, or may"),
        ({"backend": "CPU_ATTN"}, "its attention backend CPU_ATTN packs"),
    ],
)
def test_an_engine_with_packed_pages_is_refused_and_told_why(
    make: Make, caplog: pytest.LogCaptureFixture, pages: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"layer 'model.layers.0.attn': .*{message}.*turn the option portable off"):
        make(**pages)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1 and message in lines[0], "the line stands alone in the log"


def test_an_engine_with_packed_pages_starts_without_the_option(make: Make) -> None:
    assert served(make(portable=False, isa="vec16"), "a", prompt(TOKENS)) == 0


def config(rank: int = 0, tp_size: int = 1, dtype: str = "auto", backend: str = "FLASH_ATTN") -> Any:
    layers = {name: Layer(backend, None) for name in ("0", "1")}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tp_size),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def heads_of(config: Any, *specs: FullAttentionSpec) -> HeadGroups:
    """What a rank with layers of these kinds is told to hold."""
    names = [str(number) for number in range(len(specs))]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    cache = KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=groups)
    told = CacheGroups(
        ids=tuple(range(len(specs))),
        layers={name: place for place, name in enumerate(names)},
        windowed=(False,) * len(specs),
        window_blocks=(None,) * len(specs),
        block_tokens=16,
    )
    views = {
        name: torch.zeros(3, spec.num_heads, 16, spec.state_content_size_bytes // spec.dtype.itemsize, dtype=spec.dtype)
        for name, spec in zip(names, specs, strict=True)
    }
    return portable.head_groups(config, cache, told, views)


FOUR = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
TWO = dataclasses.replace(FOUR, num_kv_heads=2)
ONE = dataclasses.replace(FOUR, num_kv_heads=1)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16, max_tp_shards=1)


def test_a_rank_holds_the_heads_that_vllm_deals_out_to_it() -> None:
    assert [heads_of(config(rank, 2), FOUR).numbers for rank in (0, 1)] == [range(4), range(4, 8)]
    mixed = heads_of(config(1, 2), FOUR, TWO)
    assert (mixed.count, mixed.numbers, mixed.heads) == (4, range(2, 4), (2, 1))
    assert heads_of(config(3, 2), FOUR).numbers == range(12, 16), "the second pipeline stage has numbers of its own"


def test_one_rank_writes_the_latent_that_all_have() -> None:
    held = [heads_of(config(rank, 4), LATENT) for rank in range(4)]
    assert all((each.numbers, each.count) == (range(1), 1) for each in held)
    assert [each.writes for each in held] == [True, False, False, False]
    assert held[0].layers[0].form.row == RowForm(item_bytes=2, key_bytes=144, value_bytes=0)


def test_a_head_that_may_be_another_ranks_too_counts_as_its_own() -> None:
    held = [heads_of(config(rank, 4), ONE) for rank in range(4)]
    assert [each.numbers for each in held] == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    assert all(each.writes for each in held)


@pytest.mark.parametrize(
    ("told", "specs", "message"),
    [
        (config(dtype="int8_per_token_head"), [FOUR], "layer '0': .*kv_cache_dtype 'int8_per_token_head' packs"),
        (
            config(),
            [TWO, dataclasses.replace(LATENT, cache_dtype_str="fp8_ds_mla")],
            "layer '1': .*'fp8_ds_mla' packs",
        ),
        (
            config(),
            [dataclasses.replace(TWO, num_head_slots=2, state_content_bytes=32)],
            "layer '0': its attention backend FLASH_ATTN packs its KV in its own way",
        ),
        (config(backend="OF_NEXT_YEAR"), [FOUR], "layer '0': its attention backend OF_NEXT_YEAR packs"),
        (config(), [FOUR, FOUR, FOUR], "layer '2': its attention backend unknown packs"),
        (config(0, 2), [TWO, LATENT], "layer '0': this rank holds KV heads 0 to 1 of 4, and 2 of 4 of layer '0'"),
    ],
)
def test_what_cannot_be_told_from_packed_pages_is_refused(
    told: Any, specs: list[FullAttentionSpec], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^LayerStream: .*{message}.*turn the option portable off$"):
        heads_of(told, *specs)
