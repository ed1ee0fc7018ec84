"""Where a model's weights lie on this machine, however the model was named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.hooks.vllm import identify
from layerstream.hooks.vllm.identify import _weights_folder
from layerstream.identity import fingerprint_weights
from tests.rigs.installed_tiers import write_weights

MODEL = "some-team/some-model"


def config(model: str, cache: Path | None, *, revision: str | None = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=revision),
        load_config=SimpleNamespace(download_dir=None if cache is None else str(cache)),
    )


def snapshot(cache: Path, commit: str, content: bytes, *, ref: str | None = None) -> Path:
    """A snapshot of the model, as the hub's cache keeps it."""
    home = cache / f"models--{MODEL.replace('/', '--')}"
    folder = home / "snapshots" / commit
    folder.mkdir(parents=True)
    write_weights(folder, content)
    if ref is not None:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def test_a_folder_is_the_models_own(tmp_path: Path, cache: Path) -> None:
    write_weights(tmp_path)
    assert _weights_folder(config(str(tmp_path), cache)) == tmp_path


def test_a_model_of_the_hub_lies_where_its_snapshot_does(cache: Path) -> None:
    main = snapshot(cache, "1" * 40, b"abcd", ref="main")
    other = snapshot(cache, "2" * 40, b"efgh", ref="v2")
    assert _weights_folder(config(MODEL, cache)) == main
    assert _weights_folder(config(MODEL, cache, revision="v2")) == other
    assert _weights_folder(config(MODEL, cache, revision="2" * 40)) == other
    assert fingerprint_weights(main) != fingerprint_weights(other)


@pytest.mark.parametrize("model", [MODEL, "s3://bucket/model", "/no/such/folder", "a/b/c", "model:tag"])
def test_what_is_not_on_this_machine_has_no_folder(model: str, cache: Path) -> None:
    assert _weights_folder(config(model, cache)) is None


def test_a_revision_that_was_never_downloaded_has_none(cache: Path) -> None:
    snapshot(cache, "1" * 40, b"abcd", ref="main")
    assert _weights_folder(config(MODEL, cache, revision="v9")) is None


def test_the_default_cache_is_the_hubs_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    main = snapshot(cache, "1" * 40, b"abcd", ref="main")
    assert _weights_folder(config(MODEL, None)) == main


def test_where_a_configuration_came_from_does_not_name_a_model() -> None:
    config = {"_name_or_path": "/a", "transformers_version": "5", "rope": {"_name_or_path": "/b", "theta": 1.0}}
    assert identify._without_origin(config) == {"rope": {"theta": 1.0}}


def test_how_images_are_prepared_names_a_model(tmp_path: Path) -> None:
    digests = {identify._processor(tmp_path, None), identify._processor(tmp_path, {"size": 1})}
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0}')
    digests.add(identify._processor(tmp_path, None))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 1}')
    digests.add(identify._processor(tmp_path, None))
    assert len(digests) == 4
