"""What one engine saved, another one finds: on disk, in Mooncake Store, in LMCache's server, all of them real."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerstream.model_store import tiny_model
from tests.rigs.engine_life import EngineLife, Served
from tests.rigs.lmcache_service import LMCacheService
from tests.rigs.mooncake_service import MooncakeService, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 128
CHUNK = 2 * BLOCK
TOKENS = 5 * CHUNK + BLOCK + 37
WHOLE, WITH_TAIL = 5 * CHUNK, 5 * CHUNK + BLOCK
OBJECTS = 6


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=TOKENS)


PROMPTS = {name: prompt(seed) for seed, name in enumerate(("disk", "mooncake", "lmcache"))}


def read_from(engine: EngineLife) -> set[str]:
    """The tiers from which the engine's log says that bytes came."""
    return set(re.findall(r"(\S+) read [\d.]+ MB", "".join(re.findall(r"LayerStream tiers: .*", engine.said()))))


class Services:
    """A disk folder, a Mooncake Store and an LMCache server, with what the first engine left in them."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "kv"
        self.folder.mkdir(mode=0o700)
        self.mooncake = MooncakeService(root, owner_mib=256, lease_ms=2000)
        try:
            self.lmcache = LMCacheService(root, gib=0.25)
            self.lmcache.start()
        except BaseException:
            self.mooncake.stop()
            raise

    @property
    def tiers(self) -> list[dict[str, Any]]:
        # However busy the machine is, a lookup is not late.
        return [
            {"type": "disk", "path": str(self.folder), "gib": 1, "lookup_ms": 20_000},
            {"type": "mooncake", "master": self.mooncake.address, "lease_s": 2.0, "lookup_ms": 20_000},
            {"type": "lmcache", "url": f"tcp://127.0.0.1:{self.lmcache.port}", "lookup_ms": 20_000},
        ]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))

    def stop(self) -> None:
        self.lmcache.stop()
        self.mooncake.stop()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("services"))
    yield services
    services.stop()


@pytest.fixture(scope="module")
def first_life(services: Services, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """An engine that served each prompt cold, then from its host pool, and was stopped: the answers from the pool."""
    log = tmp_path_factory.mktemp("first") / "engine.log"
    with EngineLife(tiny_llama, log, tiers=services.tiers) as engine:
        answers: dict[str, Served] = {}
        for name, ids in PROMPTS.items():
            assert engine.serve(ids).cached_tokens == 0
            engine.forget()
            answers[name] = engine.serve(ids)
            assert answers[name].cached_tokens == WITH_TAIL
            engine.forget()
        until(lambda: len(services.files) == OBJECTS * len(PROMPTS), what="the disk tier")
        until(lambda: services.lmcache.objects["there"] == (OBJECTS - 1) * len(PROMPTS), what="the LMCache server")
        stored = sum(file.stat().st_size for file in services.files)
        until(lambda: services.mooncake.used_bytes() >= stored, what="Mooncake Store")
    return answers


def test_a_new_engine_hits_what_the_first_one_left_in_each_tier(
    services: Services, first_life: dict[str, Served], tiny_llama: Path, tmp_path: Path
) -> None:
    with EngineLife(tiny_llama, tmp_path / "engine.log", tiers=services.tiers) as engine:
        from_disk = engine.serve(PROMPTS["disk"])
        assert from_disk.cached_tokens == WITH_TAIL
        assert read_from(engine) == {"disk"}
        assert from_disk.logprobs == first_life["disk"].logprobs

        for file in services.files:
            file.unlink()
        from_mooncake = engine.serve(PROMPTS["mooncake"])
        assert from_mooncake.cached_tokens == WITH_TAIL
        assert read_from(engine) == {"disk", "mooncake"}
        assert from_mooncake.logprobs == first_life["mooncake"].logprobs

        services.mooncake.stop()
        from_lmcache = engine.serve(PROMPTS["lmcache"])
        assert from_lmcache.cached_tokens == WHOLE
        assert read_from(engine) == {"disk", "mooncake", "lmcache"}
        assert from_lmcache.token_ids == first_life["lmcache"].token_ids

        services.lmcache.kill()
        shutil.rmtree(services.folder)
        assert engine.serve(prompt(99)).cached_tokens == 0
        engine.forget()
        assert engine.serve(PROMPTS["disk"]).logprobs == first_life["disk"].logprobs


@pytest.fixture(scope="module")
def disk_life(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A disk folder in which an engine left one prompt, and the bytes of all its files."""
    root = tmp_path_factory.mktemp("disk")
    folder = root / "kv"
    with EngineLife(tiny_llama, root / "engine.log", tiers=[disk(folder)]) as engine:
        engine.serve(PROMPTS["disk"])
        until(lambda: len(contents(folder)) == OBJECTS, what="the disk tier")
    return folder, b"".join(contents(folder))


def disk(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder), "gib": 1, "lookup_ms": 20_000}


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))]


def changed_weights(folder: Path) -> Path:
    """The same model and configuration with one weight file in which one byte differs."""
    model = tiny_model(folder)
    file = next(model.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return model


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {},
    "block size": {"block_size": 64},
    "dtype": {"dtype": "bfloat16"},
    "chunk": {"options": {"chunk_tokens": 128}},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OTHERS)
def test_an_engine_whose_bytes_would_differ_hits_nothing_and_harms_nothing(
    change: str, disk_life: tuple[Path, bytes], tiny_llama: Path, tmp_path: Path
) -> None:
    folder, before = disk_life
    own = tmp_path / "kv"
    shutil.copytree(folder, own)
    model = changed_weights(tmp_path / "model") if change == "weights" else tiny_llama
    with EngineLife(model, tmp_path / "engine.log", tiers=[disk(own)], **OTHERS[change]) as engine:
        assert engine.serve(PROMPTS["disk"]).cached_tokens == 0
        until(lambda: len(contents(own)) > OBJECTS, what="what the other engine writes")
    shared = {path.name for path in folder.rglob("*.safetensors")}
    assert b"".join(data.read_bytes() for data in sorted(own.rglob("*.safetensors")) if data.name in shared) == before


@pytest.mark.slow
def test_the_unchanged_engine_hits_it(disk_life: tuple[Path, bytes], tiny_llama: Path, tmp_path: Path) -> None:
    own = tmp_path / "kv"
    shutil.copytree(disk_life[0], own)
    with EngineLife(tiny_llama, tmp_path / "engine.log", tiers=[disk(own)]) as engine:
        assert engine.serve(PROMPTS["disk"]).cached_tokens == WITH_TAIL
