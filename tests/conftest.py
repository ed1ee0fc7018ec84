"""What every test shares: deterministic property tests, no network, and the two models that engines serve."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from layerstream.model_store import cache_dir

if TYPE_CHECKING:
    from pathlib import Path

# Before anything imports them: neither vLLM nor transformers has a reason to call home from a test.
os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})

# What engines learn of this machine must not decide in a later run; models are kept.
MODELS = cache_dir()
os.environ["LAYERSTREAM_CACHE"] = tempfile.mkdtemp(prefix="layerstream-tests-")
atexit.register(shutil.rmtree, os.environ["LAYERSTREAM_CACHE"], ignore_errors=True)

# The same examples each run, and no deadline: a shared machine stalls now and then. HYPOTHESIS_PROFILE=explore
# looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made on first use and kept in the cache folder."""
    from layerstream.model_store import prepare_model

    return prepare_model(MODELS)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of 8 layers and 4 KV heads."""
    from layerstream.model_store import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny-llama"))
