"""Keys name everything that changes the bytes, and name it the same in every process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.errors import ConfigError
from layerstream.geometry import KVGeometry, LayerPages
from layerstream.identity import (
    FORMAT_VERSION,
    Namespace,
    PortableNamespace,
    canonical_digest,
    fingerprint_weights,
    object_key,
)

VALUES: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "model": "org/model",
    "revision": "0123abc",
    "weights": "aa" * 32,
    "drafter": "",
    "load_format": "auto",
    "quantization": None,
    "model_config": canonical_digest({"rope_theta": 10000.0, "head_dim": 128}),
    "processor": "e5f6",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "kv_scales": None,
    "layout": "LBNHC",
    "attention_backend": "FLASH_ATTN",
    "isa": None,
    "block_tokens": 16,
    "hash_block_tokens": 16,
    "hash_algorithm": "sha256",
    "hash_seed": "vllm-none-hash",
    "tp_size": 2,
    "pp_size": 1,
    "ranks": canonical_digest([[32, 4, 65536]] * 2),
    "lora": "name-path",
    "user": "",
    "epoch": 0,
}
BASE = Namespace(**VALUES)


def test_this_test_names_every_field() -> None:
    assert list(VALUES) == [field.name for field in dataclasses.fields(Namespace)]


@pytest.mark.parametrize("name", VALUES)
def test_every_field_changes_the_digest(name: str) -> None:
    old = VALUES[name]
    others = [old + 1] if isinstance(old, int) else [None, "", "other", f"{old} "]
    digests = {dataclasses.replace(BASE, **{name: other}).digest() for other in {*others, old}}
    assert len(digests) == len({*others, old})


PORTABLE = PortableNamespace.of(BASE, canonical_version=1, stages=["layers 0 to 15", "layers 16 to 31"])
FORGOTTEN = {"layout", "attention_backend", "isa", "block_tokens", "tp_size", "pp_size", "ranks"}
"""What the canonical form makes equal; pipeline stages are named one by one instead."""


def test_portable_objects_belong_to_all_that_changes_their_bytes_and_nothing_else() -> None:
    names = [field.name for field in dataclasses.fields(PortableNamespace)]
    assert {*names} == {*VALUES} - FORGOTTEN | {"canonical_version", "stages"}
    for name, value in VALUES.items():
        other: Any = 77 if isinstance(value, int) else "other"
        changed = dataclasses.replace(BASE, **{name: other})
        its = PortableNamespace.of(changed, canonical_version=1, stages=PORTABLE.stages)
        assert (its.digest() == PORTABLE.digest()) == (name in FORGOTTEN | {"format_version"}), name


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PortableNamespace)])
def test_every_field_of_a_portable_namespace_changes_its_digest(name: str) -> None:
    old = getattr(PORTABLE, name)
    other: Any = old + 1 if isinstance(old, int) else (*old, "more") if name == "stages" else f"{old} "
    assert dataclasses.replace(PORTABLE, **{name: other}).digest() != PORTABLE.digest()


def test_the_version_of_the_canonical_form_is_the_one_given() -> None:
    assert PortableNamespace.of(BASE, canonical_version=2, stages=PORTABLE.stages).canonical_version == 2


def test_portable_objects_and_others_never_share_a_name() -> None:
    assert len({PORTABLE.digest(), BASE.digest()}) == 2 and len(PORTABLE.digest()) == 32


def test_values_do_not_move_between_fields() -> None:
    """Equal values in another order of fields are another namespace."""
    names = list(VALUES)
    digests = set()
    for here in names:
        digests.add(dataclasses.replace(BASE, **{**VALUES, here: "moved"}).digest())
    assert len(digests) == len(names)


def test_format_version_is_the_one_written() -> None:
    values = {name: value for name, value in VALUES.items() if name != "format_version"}
    assert Namespace(**values).format_version == FORMAT_VERSION


def test_digest_is_32_bytes_and_ignores_the_order_of_arguments() -> None:
    assert len(BASE.digest()) == 32
    assert Namespace(**dict(reversed(VALUES.items()))).digest() == BASE.digest()


SCRIPT = """
import json, sys
from layerstream.geometry import KVGeometry, LayerPages
from layerstream.identity import Namespace, canonical_digest, object_key
values, config = json.load(sys.stdin)
digest = Namespace(**values).digest()
key = object_key(digest, b"hash", 16, 1)
print(digest.hex(), key.hex(), canonical_digest(config), canonical_digest({"s": {"b", "a"}}))
"""


def test_keys_are_equal_in_every_process() -> None:
    config = {"rope": {"type": "yarn", "factor": 4.0}, "heads": [8, 2], "layers": 3}
    given_order = json.dumps([VALUES, config])
    other_order = json.dumps([dict(reversed(VALUES.items())), dict(reversed(config.items()))])
    said = set()
    for seed, text in ((None, given_order), ("0", other_order), ("random", given_order)):
        env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], input=text, env=env, capture_output=True, text=True, check=True, timeout=60
        )
        said.add(tuple(done.stdout.split()))
    digest = BASE.digest()
    assert said == {
        (
            digest.hex(),
            object_key(digest, b"hash", 16, 1).hex(),
            canonical_digest(config),
            canonical_digest({"s": {"a", "b"}}),
        )
    }


def test_identity_needs_no_framework() -> None:
    code = "import sys, layerstream.identity, layerstream.config; print({'torch', 'triton', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_format": "dummy"}, "dummy weights"),
        ({"load_format": "dummy", "weights": None}, "dummy weights"),
        ({"load_format": "pt"}, "'pt' does not read safetensors"),
        ({"load_format": "tensorizer"}, "'tensorizer' does not read safetensors"),
        ({"weights": None}, "the weights have no fingerprint"),
        ({"drafter": None}, "the drafter's weights have no fingerprint"),
        ({"epoch": 1}, "updated in the process"),
        ({"hash_seed": None, "hash_algorithm": "xxhash"}, "set PYTHONHASHSEED"),
    ],
    ids=str,
)
def test_not_persistable(change: dict[str, Any], reason: str) -> None:
    persistable, why = dataclasses.replace(BASE, **change).persistable
    assert not persistable and reason in why


@pytest.mark.parametrize("change", [{}, {"load_format": "safetensors"}, {"hash_algorithm": "xxhash", "hash_seed": "0"}])
def test_persistable(change: dict[str, Any]) -> None:
    assert dataclasses.replace(BASE, **change).persistable == (True, "")


@given(
    st.lists(
        st.tuples(st.binary(max_size=6), st.binary(max_size=6), st.integers(0, 3), st.integers(1, 3)),
        unique=True,
        max_size=20,
    )
)
def test_object_keys_differ_where_anything_differs(names: list[tuple[bytes, bytes, int, int]]) -> None:
    keys = {object_key(*name) for name in names}
    assert len(keys) == len(names)
    assert all(len(key) == 32 for key in keys)


def test_object_key_keeps_its_parts_apart() -> None:
    start = (16).to_bytes(8, "little")
    names = [(b"ab", b"c", 16, 1), (b"a", b"bc", 16, 1), (b"", b"abc", 16, 1), (b"ab", b"c" + start, 16, 1)]
    assert len({object_key(*name) for name in names}) == len(names)


def test_canonical_digest_takes_a_geometry() -> None:
    def digest(run_bytes: int) -> str:
        layer = LayerPages(name="a", num_pages=4, offset=0, page_stride=64, run_offsets=(0, 32), run_bytes=run_bytes)
        return canonical_digest(KVGeometry(layers=(layer,), num_blocks=4, block_tokens=16))

    assert digest(16) == digest(16) != digest(32)


def test_canonical_digest_tells_values_apart_and_not_orders() -> None:
    assert canonical_digest({"a": 1, "b": {"c": 2, "d": 3}}) == canonical_digest({"b": {"d": 3, "c": 2}, "a": 1})
    values: list[Any] = [None, 0, False, "0", 0.5, [], {}, [0], {"a": 0}, {"a": None}, "", [1, 2], [2, 1], ["null"]]
    assert len({canonical_digest(value) for value in values}) == len(values)
    with pytest.raises(TypeError):
        canonical_digest(object())


Tensors = dict[str, tuple[list[int], bytes]]

BIG = 40_000
"""Bytes of a tensor that is sampled; a smaller one is read whole."""


def write_shard(path: Path, tensors: Tensors) -> int:
    """Write uint8 tensors; returns where the data starts."""
    entries, offset = {}, 0
    for name, (shape, data) in tensors.items():
        entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(data for _, data in tensors.values()))
    return 8 + len(header)


def write_index(folder: Path, names: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def tensors() -> Tensors:
    return {"big": ([200, 200], bytes(range(250)) * 160), "small": ([3], b"abc"), "none": ([0], b"")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    write_shard(made / "model-00001-of-00002.safetensors", tensors())
    write_shard(made / "model-00002-of-00002.safetensors", {"head": ([5], b"hello")})
    write_index(
        made,
        dict.fromkeys(tensors(), "model-00001-of-00002.safetensors") | {"head": "model-00002-of-00002.safetensors"},
    )
    return made


def test_fingerprint_survives_copies_and_times(folder: Path, tmp_path: Path) -> None:
    before = fingerprint_weights(folder)
    assert before is not None and len(bytes.fromhex(before)) == 32
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert fingerprint_weights(folder) == before
    assert fingerprint_weights(shutil.copytree(folder, tmp_path / "elsewhere")) == before


def test_fingerprint_follows_links_as_a_hub_cache_has_them(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = path.rename(tmp_path / f"blob{number}")
        (links / path.name).symlink_to(blob)
    linked = fingerprint_weights(links)
    for link in links.iterdir():
        shutil.copy(link, folder / link.name)
    assert fingerprint_weights(folder) == linked
    (tmp_path / "blob0").unlink()
    with pytest.raises(FileNotFoundError):
        fingerprint_weights(links)


@pytest.mark.parametrize("at", [0, 4095, BIG // 2 - 2048, BIG // 2 + 2047, BIG - 4096, BIG - 1, BIG, BIG + 1, BIG + 2])
def test_fingerprint_sees_every_sampled_byte(folder: Path, at: int) -> None:
    before = fingerprint_weights(folder)
    path = folder / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[write_shard(path, tensors()) + at] ^= 1
    path.write_bytes(data)
    assert fingerprint_weights(folder) != before
    write_shard(path, tensors())
    assert fingerprint_weights(folder) == before


@pytest.mark.parametrize(
    "changed",
    [
        {**tensors(), "extra": ([0], b"")},
        {"Big" if name == "big" else name: tensor for name, tensor in tensors().items()},
        {**tensors(), "big": ([40_000], tensors()["big"][1])},
        {name: tensors()[name] for name in ("big", "small")},
        dict(reversed(tensors().items())),
    ],
    ids=["added", "renamed", "reshaped", "removed", "moved"],
)
def test_fingerprint_sees_names_and_shapes(folder: Path, changed: Tensors) -> None:
    before = fingerprint_weights(folder)
    write_shard(folder / "model-00001-of-00002.safetensors", changed)
    assert fingerprint_weights(folder) != before


def test_fingerprint_sees_which_shards_are_indexed(folder: Path) -> None:
    seen = {fingerprint_weights(folder)}
    write_index(folder, {"head": "model-00002-of-00002.safetensors"})
    seen.add(fingerprint_weights(folder))
    (folder / "model.safetensors.index.json").unlink()
    seen.add(fingerprint_weights(folder))
    (folder / "model-00001-of-00002.safetensors").unlink()
    seen.add(fingerprint_weights(folder))
    assert len(seen) == 4


def test_fingerprint_sees_the_name_of_a_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    before = fingerprint_weights(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder / "model-00001-of-00003.safetensors")
    assert fingerprint_weights(folder) != before


def test_fingerprint_sees_weights_in_folders_inside(folder: Path) -> None:
    before = fingerprint_weights(folder)
    (folder / "encoder").mkdir()
    write_shard(folder / "encoder" / "model.safetensors", {"w": ([4], b"abcd")})
    with_encoder = fingerprint_weights(folder)
    write_shard(folder / "encoder" / "model.safetensors", {"w": ([4], b"abce")})
    assert len({before, with_encoder, fingerprint_weights(folder)}) == 3


def test_fingerprint_ignores_the_order_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_weights(folder)
    listed = Path.glob
    for backwards in (False, True):

        def in_order(path: Path, pattern: str, *, backwards: bool = backwards) -> list[Path]:
            return sorted(listed(path, pattern), reverse=backwards)

        monkeypatch.setattr(Path, "glob", in_order)
        assert fingerprint_weights(folder) == before


def test_fingerprint_reads_samples_alone(folder: Path) -> None:
    """A tensor of 64 GiB (a hole in a sparse file) costs three reads."""
    span = 64 << 30
    header = json.dumps({"huge": {"dtype": "U8", "shape": [span], "data_offsets": [0, span]}}).encode()
    path = folder / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + span)
    assert fingerprint_weights(folder) is not None


def test_no_safetensors_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "folder.safetensors").mkdir()
    assert fingerprint_weights(tmp_path) is None


def entry(**fields: Any) -> bytes:
    header = json.dumps({"t": fields}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b'"\xff\xfe"',
        entry(dtype="U8", shape=[1]),
        entry(dtype="U8", shape=[1], data_offsets=[0]),
        entry(dtype="U8", shape=[1], data_offsets="01"),
        entry(dtype="U8", shape=[1], data_offsets=[0, 2]) + b"1",
        entry(dtype="U8", shape=[1], data_offsets=[1, 0]) + b"1",
        entry(dtype="U8", shape=[1], data_offsets=[-1, 1]) + b"1",
    ],
)
def test_corrupt_shard_is_named(folder: Path, data: bytes) -> None:
    (folder / "bad.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.safetensors: .*download the model again"):
        fingerprint_weights(folder)


def test_header_beyond_the_format_limit_is_refused_unread(folder: Path) -> None:
    path = folder / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 10**9))
    os.truncate(path, 2 * 10**9)
    with pytest.raises(ConfigError, match="claim a header of 1000000000"):
        fingerprint_weights(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_corrupt_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json: not a safetensors index"):
        fingerprint_weights(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: model-00002-of-00002\.safetensors"):
        fingerprint_weights(folder)
