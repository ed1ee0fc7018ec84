"""Requests of the same tokens whose KV differs: none is served what another one left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from layerstream.hooks.vllm.block_hashes import BlockHashes
from tests.rigs.installed_tiers import write_weights
from tests.rigs.scheduler_rig import BLOCK, EOS, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a request has beside its tokens."""

    adapter: str = ""
    weights: bytes = b""
    """Of the adapter, in the folder that the adapter of this name always has."""
    number: int = 1
    """vLLM's number of the adapter: another one once it was unloaded and loaded again."""
    in_place: bool = False
    salt: str | None = None
    image: str = ""
    embeds: float | None = None


IDENTITIES = {
    "nothing": Identity(),
    "adapter X": Identity(adapter="X", weights=b"1111"),
    "adapter X with other weights, loaded in place": Identity(adapter="X", weights=b"2222", in_place=True),
    "adapter X with other weights, unloaded and loaded": Identity(adapter="X", weights=b"3333", number=2),
    "adapter Y": Identity(adapter="Y", weights=b"1111", number=3),
    "salt X": Identity(salt="X"),
    "salt Y": Identity(salt="Y"),
    "adapter X and salt X": Identity(adapter="X", weights=b"1111", salt="X"),
}
INPUTS = {
    "image a": Identity(image="a"),
    "image b": Identity(image="b"),
    "image X and adapter X": Identity(image="X", adapter="X", weights=b"1111"),
    "image X and salt X": Identity(image="X", salt="X"),
    "embeds": Identity(embeds=1.0),
    "other embeds": Identity(embeds=2.0),
}
ALL = {**IDENTITIES, **INPUTS}


def make_request(name: str, tokens: list[int], who: Identity, folder: Path) -> Request:
    lora = None
    if who.adapter:
        path = folder / who.adapter
        path.mkdir(exist_ok=True)
        write_weights(path, who.weights)
        lora = LoRARequest(who.adapter, who.number, str(path), load_inplace=who.in_place)
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier=who.image, mm_position=PlaceholderRange(offset=3, length=2 * BLOCK)
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=name,
        prompt_token_ids=None if who.embeds is not None else tokens,
        prompt_embeds=None if who.embeds is None else torch.full((len(tokens), 2), who.embeds),
        sampling_params=params,
        pooling_params=None,
        mm_features=[image] if who.image else None,
        lora_request=lora,
        cache_salt=who.salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class IdentityRig(SchedulerRig):
    """The rig whose KV depends on who asks."""

    def serve_as(self, name: str, tokens: list[int], who: Identity, folder: Path) -> int:
        """Serve a request of this identity while vLLM itself knows nothing; the tokens that were not computed."""
        assert self.scheduler.reset_prefix_cache()
        request = make_request(name, tokens, who, folder)
        self.requests[name], self.outputs[name] = request, []
        self.made_by[name] = hash(who)
        self.scheduler.add_request(request)
        self.run()
        return self.hits[name]

    @property
    def made_by(self) -> dict[str, int]:
        """Request -> a number of its identity."""
        return self.__dict__.setdefault("_made_by", {})  # type: ignore[no-any-return]

    def _values(self, request: Request, stop: int, layer: int) -> torch.Tensor:
        return super()._values(request, stop, layer) + self.made_by[request.request_id] % 1_000_003


def follows(second: Identity, first: Identity) -> bool:
    """Whether the second may come after the first: an adapter's weights change only where it is loaded again."""
    same = second.adapter == first.adapter and second.number == first.number
    return not same or second.weights == first.weights or second.in_place


@pytest.mark.parametrize("first", IDENTITIES)
def test_what_one_left_is_no_hit_for_another_and_stays_one_for_itself(
    make_rig: MakeRig, tmp_path: Path, first: str
) -> None:
    for seed, (second, who) in enumerate(IDENTITIES.items()):
        if second == first or not follows(who, IDENTITIES[first]):
            continue
        rig: Any = make_rig(IdentityRig)
        ids = prompt(5 * BLOCK + 3, seed=seed)
        hits = [rig.serve_as(name, ids, IDENTITIES[name], tmp_path) for name in (first, second)]
        assert hits == [0, 0], second
        assert rig.serve_as("again", ids, who, tmp_path) == 5 * BLOCK


@pytest.mark.parametrize("first", ALL)
def test_no_block_of_two_identities_has_one_name(tmp_path: Path, first: str) -> None:
    init_none_hash(sha256)
    ids = prompt(5 * BLOCK)
    for second, who in ALL.items():
        if second == first or not follows(who, ALL[first]):
            continue
        known = BlockHashes()
        mine, others = (known.of(make_request(name, ids, ALL[name], tmp_path)) for name in (first, second))
        assert len(mine) == len(others) == 5
        assert not {*mine} & {*others}, second
        assert known.of(make_request("again", ids, who, tmp_path)) == others


SCRIPT = """
import json
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from layerstream.hooks.vllm.block_hashes import BlockHashes
init_none_hash(sha256)
request = Request("r", list(range(160)), SamplingParams(max_tokens=1), None, cache_salt="salt",
                  block_hasher=get_request_block_hasher(16, sha256))
print(json.dumps([get_none_hash_seed(), [each.hex() for each in BlockHashes().of(request)]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fresh_processes_name_blocks_alike_unless_their_namespaces_differ() -> None:
    """vLLM makes its hashes depend on PYTHONHASHSEED where that is set; a namespace has it among its fields."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    said = []
    for env in (plain, plain, plain | {"PYTHONHASHSEED": "0"}):
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True, check=True)
        said.append(json.loads(done.stdout.splitlines()[-1]))
    (seed, names), again, (other_seed, other_names) = said
    assert again == [seed, names] and len(set(names)) == 10
    assert other_seed != seed, "or engines that share nothing would have one namespace"
    assert not {*names} & {*other_names}
