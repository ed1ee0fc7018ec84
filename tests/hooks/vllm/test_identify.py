"""Where a model's weights lie on this machine, however the model was named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.hooks.vllm import identify
from layerstream.identity import fingerprint_weights
from tests.rigs.installed_tiers import write_weights

MODEL = "some-team/some-model"


def config(
    model: str, cache: Path | None, *, revision: str | None = None, drafter: str | None = None
) -> SimpleNamespace:
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(model=drafter, revision=None))
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=revision),
        speculative_config=speculative if drafter else None,
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


def weights_folder(config: Any) -> Path | None:
    return identify._weights_folder(config, config.model_config)


def drafter(config: Any) -> str | None:
    return identify._drafter(config)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def test_a_folder_is_the_models_own(tmp_path: Path, cache: Path) -> None:
    write_weights(tmp_path)
    assert weights_folder(config(str(tmp_path), cache)) == tmp_path


def test_a_model_of_the_hub_lies_where_its_snapshot_does(cache: Path) -> None:
    main = snapshot(cache, "1" * 40, b"abcd", ref="main")
    other = snapshot(cache, "2" * 40, b"efgh", ref="v2")
    assert weights_folder(config(MODEL, cache)) == main
    assert weights_folder(config(MODEL, cache, revision="v2")) == other
    assert weights_folder(config(MODEL, cache, revision="2" * 40)) == other
    assert fingerprint_weights(main) != fingerprint_weights(other)


@pytest.mark.parametrize("model", [MODEL, "s3://bucket/model", "/no/such/folder", "a/b/c", "model:tag"])
def test_what_is_not_on_this_machine_has_no_folder(model: str, cache: Path) -> None:
    assert weights_folder(config(model, cache)) is None


def test_a_revision_that_was_never_downloaded_has_none(cache: Path) -> None:
    snapshot(cache, "1" * 40, b"abcd", ref="main")
    assert weights_folder(config(MODEL, cache, revision="v9")) is None


def test_the_default_cache_is_the_hubs_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    main = snapshot(cache, "1" * 40, b"abcd", ref="main")
    assert weights_folder(config(MODEL, None)) == main


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


def test_a_model_that_drafts_is_named_by_its_own_weights(tmp_path: Path, cache: Path) -> None:
    named = []
    for content in (b"abcd", b"efgh"):
        folder = tmp_path / content.decode()
        folder.mkdir()
        write_weights(folder, content)
        named.append(drafter(config(MODEL, cache, drafter=str(folder))))
    assert named == [fingerprint_weights(tmp_path / "abcd"), fingerprint_weights(tmp_path / "efgh")]
    assert named[0] != named[1]


def test_without_a_drafter_of_its_own_there_is_nothing_to_name(cache: Path) -> None:
    assert drafter(config(MODEL, cache)) == drafter(config(MODEL, cache, drafter=MODEL)) == ""


def test_another_revision_of_the_model_is_a_drafter_of_its_own(cache: Path) -> None:
    folder = snapshot(cache, "1" * 40, b"abcd", ref="main")
    snapshot(cache, "2" * 40, b"efgh", ref="v2")
    assert drafter(config(MODEL, cache, revision="v2", drafter=MODEL)) == fingerprint_weights(folder)


def test_a_drafter_that_is_not_on_this_machine_cannot_be_named(cache: Path) -> None:
    assert drafter(config(MODEL, cache, drafter="some-team/some-drafter")) is None
