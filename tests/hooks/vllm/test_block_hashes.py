from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layerstream.hooks.vllm.block_hashes import BlockHashes


def request(hashes: list[bytes], lora: Any = None, name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, block_hashes=hashes, lora_request=lora)


def adapter(folder: Path, content: bytes, **more: Any) -> Any:
    folder.mkdir(exist_ok=True)
    entry = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    header = json.dumps(entry).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    return SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(folder), **more)


def test_one_list_grows_with_vllms_own() -> None:
    known, theirs = BlockHashes(), [b"a", b"b"]
    mine = known.of(request(theirs))
    assert mine == theirs and mine is not theirs
    theirs.append(b"c")
    assert known.of(request(theirs)) is mine and mine == [b"a", b"b", b"c"]


def test_a_list_that_vllm_rewrites_becomes_another_one_and_the_old_one_stays() -> None:
    for rest in ([b"x", b"y"], [b"b"], []):
        known, theirs = BlockHashes(), [b"a", b"b", b"c"]
        mine = known.of(request(theirs))
        theirs[1:] = rest
        assert known.of(request(theirs)) == theirs
        assert mine == [b"a", b"b", b"c"]


def test_a_forgotten_request_starts_anew() -> None:
    known, theirs = BlockHashes(), [b"a"]
    mine = known.of(request(theirs))
    known.forget("r")
    assert known.of(request(theirs)) is not mine


def test_an_adapters_weights_are_in_every_hash(tmp_path: Path) -> None:
    theirs = [b"a" * 32, b"b" * 32]
    first = BlockHashes().of(request(theirs, adapter(tmp_path / "lora", b"abcd")))
    again = BlockHashes().of(request(theirs, adapter(tmp_path / "lora", b"abcd")))
    other = BlockHashes().of(request(theirs, adapter(tmp_path / "lora", b"abce")))
    assert first == again and not {*first} & {*other} and not {*first} & {*theirs}


def test_an_adapter_loaded_in_place_is_looked_at_again(tmp_path: Path) -> None:
    known, theirs = BlockHashes(), [b"a" * 32]
    kept = known.of(request(theirs, adapter(tmp_path / "lora", b"abcd"), name="1"))
    assert known.of(request(theirs, adapter(tmp_path / "lora", b"abcd"), name="2")) == kept
    assert known.of(request(theirs, adapter(tmp_path / "lora", b"abce", load_inplace=True), name="3")) != kept


def test_an_adapter_without_a_fingerprint_is_found_in_this_process_alone(tmp_path: Path) -> None:
    lora, theirs, known = (
        SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path)),
        [b"a" * 32],
        BlockHashes(),
    )
    assert known.of(request(theirs, lora, name="1")) == known.of(request(theirs, lora, name="2"))
    assert BlockHashes().of(request(theirs, lora)) != known.of(request(theirs, lora, name="1"))
