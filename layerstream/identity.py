"""What saved bytes belong to: the namespace of an engine, the keys made from it, the fingerprint of its weights.

vLLM's block hashes cover tokens, LoRA name and path, images, embeds and salt. They do not cover the model, its weights,
dtypes, layout or ranks; a `Namespace` names those, so that bytes of one engine are never taken for another's.

Every hash is BLAKE2b with 32 bytes (RFC 7693) and a `person` of its own for each use: a collision would be a wrong
answer, so nothing weaker will do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from layerstream.errors import ConfigError

FORMAT_VERSION = 1
"""Raised whenever the bytes saved for a block change their meaning."""

_DIGEST_BYTES = 32
_SAMPLE_BYTES = 4096
# safetensors refuses longer headers itself (MAX_HEADER_SIZE in its tensor.rs); the limit bounds memory here.
_MAX_HEADER_BYTES = 100_000_000
# vLLM's load formats that read the safetensors files of the model folder, hence those `fingerprint_weights` speaks for.
_SAFETENSORS_FORMATS = frozenset(
    {
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)


PORTABLE_HASH_TOKENS = 16
"""Portable objects are named by hashes of so many tokens, or fewer where that divides no block of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that changes the bytes of a block, beside what its hash names. Every field changes `digest`."""

    format_version: int = FORMAT_VERSION
    model: str
    """Name or path, as given to the engine; empty where `weights` names the model."""
    revision: str | None
    """Commit of the model repository, where known; None where `weights` names it."""
    weights: str | None
    """`fingerprint_weights` of the model's folder; None if it cannot be had."""
    drafter: str | None
    """`fingerprint_weights` of the folder of a model that drafts, whose layers have KV too; empty without one, None if
    it cannot be had."""
    load_format: str
    """Where the engine takes weights from: "auto", "dummy", ..."""
    quantization: str | None
    """Method the engine applies to the weights, also while loading."""
    model_config: str
    """`canonical_digest` of the model's configuration after overrides: rope, head sizes, windows."""
    processor: str
    """Digest of how images and sounds become what the model sees, beside the model's configuration."""
    dtype: str
    kv_cache_dtype: str
    kv_scales: str | None
    """Where the scales of a quantized cache come from; scales live in the layers, not in the cache."""
    layout: str
    """Order of dimensions of the KV cache, as the engine names it."""
    attention_backend: str
    isa: str | None
    """Instruction set that pages on a CPU are packed for; None on a GPU."""
    block_tokens: int
    """Tokens in one block, as the scheduler counts them."""
    hash_block_tokens: int
    """Tokens covered by one block hash."""
    hash_algorithm: str
    hash_seed: str | None
    """What the first block hash of a prefix starts from; None if it is random in each process."""
    tp_size: int
    pp_size: int
    ranks: str
    """`canonical_digest` of every rank's layers, KV heads and page sizes, and of which ranks keep the KV of others."""
    lora: str
    """How adapters are told apart: block hashes carry name and path, never content."""
    user: str
    """Option `namespace`."""
    epoch: int
    """Count of weight updates in this process."""

    def digest(self) -> bytes:
        """32 bytes, equal in every process for equal fields."""
        return _blake(b"ls.namespace", msgspec.json.encode(self, order="sorted")).digest()

    @property
    def persistable(self) -> tuple[bool, str]:
        """Whether bytes may outlive this process, and if not, why (empty otherwise)."""
        if self.load_format == "dummy":
            return False, "dummy weights are random; bytes made from them are never kept beyond the process"
        if self.load_format not in _SAFETENSORS_FORMATS:
            return False, (
                f"load format {self.load_format!r} does not read safetensors files, so the weights cannot be "
                f"fingerprinted; use one of {', '.join(sorted(_SAFETENSORS_FORMATS))}"
            )
        if self.weights is None:
            return False, "the weights have no fingerprint: the model is not a local folder with safetensors files"
        if self.drafter is None:
            return False, "the drafter's weights have no fingerprint: it is not a local folder with safetensors files"
        if self.epoch:
            return False, "weights were updated in the process, so the fingerprint of the files no longer names them"
        if self.hash_seed is None:
            return False, (
                f"block hashes of {self.hash_algorithm!r} start from a random seed in each process; set PYTHONHASHSEED "
                "or use a sha256 algorithm"
            )
        return True, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableNamespace:
    """Everything that changes the bytes of portable objects, beside what their hashes name. Every field changes
    `digest`. Fields that `Namespace` has too mean the same.

    Of that it leaves out what the canonical form makes equal: layout, attention backend, instruction set, blocks, and
    how ranks deal out heads.
    """

    format_version: int = FORMAT_VERSION
    canonical_version: int
    """`layerstream.canonical.VERSION`."""
    model: str
    revision: str | None
    weights: str | None
    drafter: str | None
    load_format: str
    quantization: str | None
    model_config: str
    processor: str
    dtype: str
    kv_cache_dtype: str
    kv_scales: str | None
    hash_block_tokens: int
    hash_algorithm: str
    hash_seed: str | None
    stages: tuple[str, ...]
    """For each pipeline stage, `HeadGroups.digest` of its layers, their rows and KV heads."""
    lora: str
    user: str
    epoch: int

    @classmethod
    def of(cls, namespace: Namespace, *, canonical_version: int, stages: Sequence[str]) -> PortableNamespace:
        """What an engine's portable objects belong to.

        Args:
            namespace: of the engine.
            canonical_version: `layerstream.canonical.VERSION`.
            stages: see the field.
        """
        own = {"format_version", "canonical_version", "stages"}
        same = {field.name: getattr(namespace, field.name) for field in fields(cls) if field.name not in own}
        return cls(canonical_version=canonical_version, stages=tuple(stages), **same)

    def digest(self) -> bytes:
        """32 bytes, equal in every process for equal fields."""
        return _blake(b"ls.portable", msgspec.json.encode(self, order="sorted")).digest()


def object_key(namespace_digest: bytes, last_block: bytes, start: int, blocks: int) -> bytes:
    """Name of a tier object, the same for every rank's: 32 bytes.

    Args:
        namespace_digest: `Namespace.digest()`.
        last_block: the engine's hash of the object's last block, of any length; chained, so it names the whole prefix.
        start: blocks of the prefix before the object.
        blocks: blocks in the object. Engines with other chunks cut the same prefix into other objects. Of portable
            objects both are in block hashes, of which a block has one or several.
    """
    digest = _blake(b"ls.object")
    _feed(digest, namespace_digest, last_block, start.to_bytes(8, "little"), blocks.to_bytes(8, "little"))
    return digest.digest()


def canonical_digest(value: Any) -> str:
    """Hex digest of a JSON-like value or dataclass, whatever the order of its mappings' keys.

    Raises:
        TypeError: something in `value` has no JSON form.
    """
    return _blake(b"ls.value", msgspec.json.encode(value, order="sorted")).hexdigest()


def fingerprint_weights(folder: Path) -> str | None:
    """Hex digest of a model's safetensors files, or None if the folder holds none.

    Covers each file's name and header (names, dtypes, shapes, offsets) and the first, middle and last 4 KiB of every
    tensor: fine-tuning moves all of a tensor, so samples see it, and a 70B model costs seconds, not a read of 140 GB.
    Times of files count for nothing, so a copy has the same fingerprint. Memory is bounded by the largest header.

    Raises:
        ConfigError: a file is not valid safetensors, or an index names a file that is missing.
        OSError: a file cannot be read.
    """
    # Encoders may have folders of their own.
    shards = sorted(path for path in folder.rglob("*.safetensors") if not path.is_dir())
    if not shards:
        return None
    digest = _blake(b"ls.weights")
    # An engine loads only the shards that the index names, so the same shards under another index are another model.
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _feed(digest, index.name.encode(), msgspec.json.encode(_indexed(index, {shard.name for shard in shards})))
    for shard in shards:
        _feed(digest, shard.relative_to(folder).as_posix().encode())
        with shard.open("rb") as file:
            header, data_start, spans = _read_header(shard, file)
            _feed(digest, header)
            for begin, end in spans:
                for start, length in _samples(begin, end):
                    file.seek(data_start + start)
                    _feed(digest, file.read(length))
    return digest.hexdigest()


class _TensorEntry(msgspec.Struct):
    """The part of a safetensors header entry that says where a tensor's bytes lie, from the end of the header."""

    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(index: Path, present: set[str]) -> list[str]:
    """Names of the shards in an index, sorted."""
    try:
        named = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{index}: not a safetensors index ({error}); download the model again") from error
    if missing := sorted(named - present):
        raise ConfigError(f"{index}: names files that are missing: {', '.join(missing)}; download the model again")
    return sorted(named)


def _read_header(path: Path, file: BinaryIO) -> tuple[bytes, int, list[tuple[int, int]]]:
    """A file's raw header, where its data starts, and the tensors' (begin, end) from there, in order of the file."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    data_bytes = size - 8 - length
    if data_bytes < 0 or length > _MAX_HEADER_BYTES:
        raise ConfigError(
            f"{path}: not a safetensors file: {size} bytes that claim a header of {length} (at most "
            f"{_MAX_HEADER_BYTES}); download the model again"
        )
    header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        spans = sorted(msgspec.json.decode(entry, type=_TensorEntry).data_offsets for entry in entries.values())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: its safetensors header is corrupt ({error}); download the model again") from error
    for begin, end in spans:
        if not 0 <= begin <= end <= data_bytes:
            raise ConfigError(
                f"{path}: a tensor lies at bytes {begin} to {end} of {data_bytes} bytes of data; the file is cut short "
                "or its header is corrupt; download the model again"
            )
    return header, 8 + length, spans


def _samples(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the bytes read of a tensor at [begin, end): all of a small one, else three samples."""
    if end - begin <= 3 * _SAMPLE_BYTES:
        yield begin, end - begin
        return
    for start in (begin, begin + (end - begin - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
        yield start, _SAMPLE_BYTES


def _blake(person: bytes, data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=person)


def _feed(digest: hashlib.blake2b, *parts: bytes) -> None:
    """Add parts with their lengths, so that bytes cannot move from one part to the next unnoticed."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
