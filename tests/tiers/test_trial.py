from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.base import Batch, StoreSite, TierStore
from layerstream.tiers.disk.tier import DiskTier
from layerstream.tiers.objects import ObjectFormat
from layerstream.tiers.trial import try_tier

FORM = ObjectFormat(layers=["a", "b"], page_bytes=[4096, 100], chunk_blocks=4, block_tokens=16, rank=0)


def disk(folder: Path, **options: Any) -> DiskTier:
    return DiskTier.parse({"path": str(folder), "gib": 1 / 1024, **options})


def test_a_trial_tells_rates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    trial = try_tier(disk(folder), FORM, objects=5)
    assert trial.nbytes == 5 * FORM.nbytes(4)
    assert trial.write_bytes_per_s > 0 and trial.read_bytes_per_s > 0 and trial.find_seconds > 0
    assert trial.usage is not None and trial.usage.capacity_bytes == 1 << 20
    assert list(folder.rglob("*.safetensors")) == []


def test_more_than_the_tier_holds_is_said(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="no room for a trial"):
        try_tier(disk(tmp_path / "kv"), FORM, objects=100)


def test_a_tier_that_cannot_work_is_said(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigError):
        try_tier(disk(tmp_path / "kv"), FORM, objects=1)


def lost(store: TierStore, batch: Batch) -> int:
    return 0


def damaged(store: TierStore, batch: Batch) -> int:
    count = type(store).read(store, batch)
    batch.items[-1].layers[1][0][0] ^= 1
    return count


@pytest.mark.parametrize(("read", "message"), [(lost, "did not give back all of 3"), (damaged, "layer b are damaged")])
def test_a_tier_that_does_not_give_back_what_it_got_has_failed(
    read: Callable[[TierStore, Batch], int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk(tmp_path / "kv")
    opened = type(tier).open_store

    def open_store(self: DiskTier, site: StoreSite) -> TierStore:
        store = opened(self, site)
        object.__setattr__(store, "read", lambda batch: read(store, batch))
        return store

    monkeypatch.setattr(DiskTier, "open_store", open_store)
    with pytest.raises(TierError, match=message):
        try_tier(tier, FORM, objects=3)
    assert list((tmp_path / "kv").rglob("*.safetensors")) == []
