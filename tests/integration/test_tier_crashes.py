"""Engines killed amid writing to disk: what they leave is right as far as it goes, and the next one tidies up."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from layerstream.cli.inspection import Pruning, run
from layerstream.tiers.disk.audit import audit, list_folder
from layerstream.tiers.disk.folder import DiskFolder
from layerstream.tiers.objects import ObjectHeader
from tests.rigs.engine_life import EngineLife, Served
from tests.rigs.mooncake_service import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 128
CHUNK = 2 * BLOCK
OBJECTS = 15
TOKENS = OBJECTS * CHUNK + 37
DEATHS = 3
PROMPTS = [random.Random(seed).choices(range(10, 500), k=TOKENS) for seed in range(DEATHS)]


def disk(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "disk", "path": str(folder), "gib": 2}]


def headers(folder: Path) -> list[ObjectHeader]:
    """Of all objects; each is whole."""
    names = list_folder(DiskFolder(folder)).objects
    files = list(audit(DiskFolder(folder), names, verify=True, progress=lambda _: None))
    assert all(file.state == "whole" for file in files)
    return [file.header for file in files if file.header is not None]


def unfinished(folder: Path) -> list[Path]:
    return list(folder.glob("v1/*/.*.tmp"))


def chain_of(found: list[ObjectHeader], known: set[str]) -> list[ObjectHeader]:
    """The objects of the one prompt that is not known yet, from its beginning up to the first gap."""
    chain: list[ObjectHeader] = []
    new = {(header.parent, header.start): header for header in found if header.key not in known}
    parent = next((header.parent for header in found if header.start == 0), "")
    while following := new.get((parent, len(chain) * CHUNK // BLOCK)):
        chain.append(following)
        parent = following.key
    return chain


def await_whole_prompt(folder: Path, known: set[str]) -> None:
    """Wait until all objects of one more prompt are there."""

    def new() -> int:
        return sum(path.name.partition(".")[0] not in known for path in folder.glob("v1/*/*.safetensors"))

    until(lambda: new() == OBJECTS, what="the rest of the prompt")


@dataclass
class Death:
    chain: list[ObjectHeader]
    unfinished: int
    answer: Served | None = None


def die(engine: EngineLife, folder: Path, prompt: list[int]) -> int:
    """Let it serve, and kill it while it writes; how many unfinished files there were at that moment."""
    before = len(list(folder.glob("v1/*/*.safetensors")))
    engine.begin([prompt])
    deadline = time.monotonic() + 120
    while not (unfinished(folder) and len(list(folder.glob("v1/*/*.safetensors"))) >= before + 2):
        assert time.monotonic() < deadline
    engine.kill()
    return len(unfinished(folder))


@pytest.fixture(scope="module")
def deaths(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Death]]:
    """Each prompt is written by an engine that is killed meanwhile, and then served by the next one."""
    root = tmp_path_factory.mktemp("crashes")
    folder = root / "kv"
    found: list[Death] = []
    known: set[str] = set()
    for life in range(DEATHS + 1):
        with EngineLife(tiny_llama, root / f"engine-{life}.log", tiers=disk(folder)) as engine:
            if found:
                until(lambda: not unfinished(folder), what="the folder without unfinished files")
                found[-1].answer = engine.serve(PROMPTS[life - 1])
                await_whole_prompt(folder, known)
                known |= {header.key for header in headers(folder)}
            if life < DEATHS:
                left = die(engine, folder, PROMPTS[life])
                assert run(folder, verify=True, pruning=Pruning()) == 0
                found.append(Death(chain_of(headers(folder), known), left))
    return folder, found


def test_each_died_amid_writing(deaths: tuple[Path, list[Death]]) -> None:
    for death in deaths[1]:
        assert 2 <= len(death.chain) < OBJECTS
    assert sum(death.unfinished for death in deaths[1]) > 0


def test_the_next_engine_hits_what_is_there(deaths: tuple[Path, list[Death]]) -> None:
    for death in deaths[1]:
        assert death.answer is not None
        assert death.answer.cached_tokens == len(death.chain) * CHUNK


@pytest.fixture(scope="module")
def undisturbed(
    deaths: tuple[Path, list[Death]], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Served]]:
    """The same prompts from objects of an engine that nobody killed, as many of them as there were then."""
    root = tmp_path_factory.mktemp("undisturbed")
    folder, known = root / "kv", set[str]()
    chains: list[list[ObjectHeader]] = []
    with EngineLife(tiny_llama, root / "first.log", tiers=disk(folder)) as engine:
        for prompt in PROMPTS:
            engine.serve(prompt)
            await_whole_prompt(folder, known)
            chains.append(chain_of(headers(folder), known))
            known |= {header.key for header in chains[-1]}
    for death, chain in zip(deaths[1], chains, strict=True):
        for header in chain[len(death.chain) :]:
            next(folder.glob(f"v1/*/{header.key}.0.safetensors")).unlink()
    with EngineLife(tiny_llama, root / "second.log", tiers=disk(folder)) as engine:
        yield [engine.serve(prompt) for prompt in PROMPTS]
    shutil.rmtree(folder)


def test_its_answers_are_those_of_engines_that_nobody_killed(
    deaths: tuple[Path, list[Death]], undisturbed: list[Served]
) -> None:
    for death, wanted in zip(deaths[1], undisturbed, strict=True):
        assert death.answer is not None
        assert death.answer.cached_tokens == wanted.cached_tokens
        assert death.answer.logprobs == wanted.logprobs
