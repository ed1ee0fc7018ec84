from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from layerstream.hooks.vllm.block_hashes import BlockHashes, FinerHashes


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
    kept = known.of(request(theirs, adapter(tmp_path / "lora", b"abcd"), name="before"))
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


def test_a_request_that_runs_while_its_adapter_is_loaded_anew_shares_nothing_from_then_on(tmp_path: Path) -> None:
    known, theirs, longer = BlockHashes(), [b"a" * 32], [b"a" * 32, b"b" * 32]
    runs = request(theirs, adapter(tmp_path / "lora", b"abcd"), name="runs")
    before = known.of(runs)
    fresh = request(longer, adapter(tmp_path / "lora", b"abce", load_inplace=True), name="fresh")
    after = known.of(fresh)
    theirs.append(longer[1])
    mixed = known.of(runs)
    assert mixed is known.of(runs) and len(mixed) == 2 and len(before) == 1
    assert not {*mixed} & {*before, *after}, "its second block was computed behind another adapter's"
    theirs[1:] = [b"c" * 32]
    adapter(tmp_path / "lora", b"abcd")
    assert not {*known.of(runs)} & {*BlockHashes().of(request(theirs, runs.lora_request))}, "after a rewrite neither"


def test_what_comes_after_new_weights_under_an_old_path_is_found_in_this_process_alone(tmp_path: Path) -> None:
    # vLLM's own blocks of that name and path stay, so a request with the new weights may begin with old KV.
    known, theirs = BlockHashes(), [b"a" * 32]
    known.of(request(theirs, adapter(tmp_path / "lora", b"abcd"), name="before"))
    for number, more in enumerate(({"load_inplace": True}, {"load_inplace": False})):
        lora = adapter(tmp_path / "lora", b"abc%d" % number, **more)
        lora.lora_int_id = 1 + number
        found = known.of(request(theirs, lora, name=f"{number}"))
        assert known.of(request(theirs, lora, name=f"{number} again")) == found
        assert BlockHashes().of(request(theirs, lora)) != found


def test_how_strongly_an_adapter_counts_is_in_every_hash(tmp_path: Path) -> None:
    lora, theirs = adapter(tmp_path / "lora", b"abcd"), [b"a" * 32]
    found = []
    for alpha in (8, 16):
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        found.append(BlockHashes().of(request(theirs, lora)))
    assert found[0] != found[1]


def finer(block_tokens: int, tokens: int = 4) -> BlockHashes:
    return BlockHashes(FinerHashes(tokens=tokens, block_tokens=block_tokens, algorithm="sha256"))


def served_request(tokens: list[int], block_tokens: int, **more: Any) -> Request:
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, 1)
    return Request(
        request_id="r",
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_tokens, sha256),
        **more,
    )


def test_engines_with_other_blocks_name_the_same_prefixes_alike() -> None:
    tokens = list(range(2, 63))
    short = BlockHashes().of(served_request(tokens, 4))
    assert len(short) == 15
    for block_tokens in (8, 12, 16):
        named = finer(block_tokens).of(served_request(tokens, block_tokens))
        each = block_tokens // 4
        assert named == short[each - 1 :: each][: 61 // block_tokens] and named
    assert finer(4).of(served_request(tokens, 4)) == short


def test_names_that_come_one_by_one_are_those_that_come_at_once() -> None:
    tokens = [3 + number * 7 % 90 for number in range(64)]
    growing, known = served_request(tokens[:5], 8), finer(8)
    mine = known.of(growing)
    for token in tokens[5:]:
        growing.append_output_token_ids(token)
        assert known.of(growing) is mine and len(mine) == len(growing.block_hashes)
    assert mine == finer(8).of(served_request(tokens, 8))


def test_no_block_is_named_before_vllm_names_it() -> None:
    request, known = served_request(list(range(2, 34)), 8), finer(8)
    last = request.block_hashes.pop()
    assert len(mine := known.of(request)) == 3
    request.block_hashes.append(last)
    assert known.of(request) is mine and mine == finer(8).of(request) and len(mine) == 4


def test_names_follow_a_prefix_that_is_rewritten() -> None:
    known, tokens = finer(8), list(range(2, 34))
    request = served_request(tokens, 8)
    before = known.of(request)
    other = served_request([*tokens[:13], 99, *tokens[14:]], 8)
    after = known.of(other)
    assert after == finer(8).of(other) and before[:1] == after[:1] and before[1] != after[1]
    assert len(before) == 4, "whoever has the old list keeps it"


def test_salts_are_in_finer_names_too() -> None:
    tokens = list(range(2, 34))
    plain = finer(8).of(served_request(tokens, 8))
    salted = finer(8).of(served_request(tokens, 8, cache_salt="pepper"))
    assert not {*plain} & {*salted}
    assert salted == BlockHashes().of(served_request(tokens, 4, cache_salt="pepper"))[1::2]


def test_an_adapters_weights_are_in_finer_names_too(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    adapter(folder, b"abcd")
    lora = LoRARequest(lora_name="a", lora_int_id=1, lora_path=str(folder))
    tokens = list(range(2, 34))
    short = BlockHashes().of(served_request(tokens, 4, lora_request=lora))
    assert finer(8).of(served_request(tokens, 8, lora_request=lora)) == short[1::2]


def test_a_request_that_ended_leaves_nothing_behind() -> None:
    each = FinerHashes(tokens=4, block_tokens=8, algorithm="sha256")
    known = BlockHashes(each)
    mine = known.of(request := served_request(list(range(2, 34)), 8))
    known.forget("r")
    assert not each._known
    assert known.of(request) == mine
