"""What the disk tier moves, beside fio; what checks cost; and how soon a full folder is known."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from layerstream.jobs import JobKind, Report
from layerstream.tiers.disk.folder import OBJECTS, SHARDS, DiskFolder, file_name
from layerstream.tiers.disk.store import DiskStore
from layerstream.tiers.disk.tier import DiskTier
from layerstream.tiers.mover import TierMover
from profiles.microbench.fio import Fio, FioNotThereError
from profiles.microbench.machine import filesystem
from profiles.microbench.results import Results, Row, Target
from profiles.microbench.tier_rig import READ_THREADS, WRITE_THREADS, TierRig, engine_page_bytes
from profiles.microbench.tier_services import disk_folder
from profiles.microbench.turns import PROMPT_TOKENS, compare_rates

CHUNKS = 64
"""In the prefix that is moved; fewer if prompts are shorter than usual."""
FILES = 100_000
SCANS = 10
HANG_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk tier in a folder on a disk, and objects for it."""

    folder: Path
    tier: DiskTier
    store: DiskStore
    objects: TierRig

    @property
    def nbytes(self) -> int:
        """Of all objects."""
        return self.objects.count * self.objects.object_bytes

    @property
    def facts(self) -> str:
        """For notes."""
        size = self.objects.object_bytes / 2**20
        return f"{self.objects.count} files of {size:.2f} MiB on {filesystem(self.folder)}"


@pytest.fixture(scope="module")
def disk(prompt_tokens: int, results: Results) -> Iterator[Disk]:
    pairs_of_chunks = max(1, CHUNKS * prompt_tokens // PROMPT_TOKENS // 2)
    with disk_folder() as folder, closing(TierRig(2 * pairs_of_chunks, page_bytes=engine_page_bytes())) as objects:
        results.settings["filesystem of the disk tier"] = filesystem(folder)
        tier = DiskTier.parse({"path": str(folder / "tier"), "gib": 1024})
        with closing(tier.open_store(objects.site)) as store:
            yield Disk(folder=folder, tier=tier, store=store, objects=objects)


def fio_for(how: Literal["write", "read"], disk: Disk, results: Results) -> tuple[Row, Fio]:
    """The row, and fio with files in a folder that is not there yet. Skips the test without fio."""
    row = Row(name=f"disk {how}: rate / fio's with O_DIRECT", target=Target(relation=">=", value=0.90))
    try:
        fio = Fio(disk.folder / "fio", files=disk.objects.count, file_bytes=disk.objects.object_bytes)
    except FioNotThereError as error:
        row.failure = f"not run: {error}"
        results.add(row)
        pytest.skip(row.failure)
    results.settings["fio"] = fio.version
    fio.folder.mkdir()
    return row, fio


def test_disk_writes_beside_fio(disk: Disk, results: Results, max_pairs: int, say: Say) -> None:
    row, fio = fio_for("write", disk, results)
    objects, store = disk.objects, disk.store

    def ours() -> float:
        batch = objects.sealed(objects.names(objects.count))
        seconds = objects.move(store.write, batch, threads=WRITE_THREADS)
        store.remove(batch)
        return seconds

    def theirs() -> float:
        seconds = fio.seconds("write", jobs=WRITE_THREADS)
        for path in fio.names(WRITE_THREADS):
            path.unlink()
        return seconds

    note = f"{disk.facts}, {WRITE_THREADS} thread each, new files, nothing flushed"
    results.add(compare_rates(row, theirs, ours, max_pairs, say, nbytes=disk.nbytes, note=note))
    fio.folder.rmdir()


def test_disk_reads_beside_fio(disk: Disk, results: Results, max_pairs: int, say: Say) -> None:
    row, fio = fio_for("read", disk, results)
    objects, store = disk.objects, disk.store
    batch = objects.sealed(objects.names(objects.count))
    assert store.write(batch) == objects.count
    for item, path in zip(batch.items, fio.names(READ_THREADS), strict=True):
        os.link(DiskFolder(disk.folder / "tier").path_of(file_name(item.object.key.hex(), 0)), path)
    blank = objects.blank([item.object for item in batch.items])
    objects.move(store.read, blank, threads=READ_THREADS)
    assert objects.holds(blank)

    def ours() -> float:
        return objects.move(store.read, batch, threads=READ_THREADS)

    def theirs() -> float:
        return fio.seconds("read", jobs=READ_THREADS)

    note = f"{disk.facts}, {READ_THREADS} threads each, the same files"
    results.add(compare_rates(row, theirs, ours, max_pairs, say, nbytes=disk.nbytes, note=note))
    store.remove(batch)
    shutil.rmtree(fio.folder)


def test_disk_reads_of_the_mover_beside_the_store_alone(disk: Disk, results: Results, max_pairs: int, say: Say) -> None:
    objects, store = disk.objects, disk.store
    batch = objects.sealed(objects.names(objects.count))
    job = objects.job([item.object for item in batch.items], JobKind.PROMOTE)
    assert store.write(batch) == objects.count
    mover = TierMover([("disk", disk.tier.open_store)], pool=objects.pool, format=objects.format)

    def ours() -> float:
        report, begun = Report(), time.perf_counter()
        mover.submit([job])
        while not mover.poll(report):
            assert time.perf_counter() - begun < HANG_S, "the job hangs"
            # As often as an engine's steps would ask, or more.
            time.sleep(1e-3)
        seconds = time.perf_counter() - begun
        assert report.moved == {job.job_id: (1, objects.count)}
        return seconds

    def theirs() -> float:
        return objects.move(store.read, batch, threads=READ_THREADS)

    row = Row(name="disk read with checks by the mover: rate / the store's alone")
    note = f"{disk.facts}, {READ_THREADS} threads each"
    try:
        results.add(compare_rates(row, theirs, ours, max_pairs, say, nbytes=disk.nbytes, note=note))
    finally:
        assert mover.close(HANG_S)
    store.remove(batch)


def test_disk_scan_at_the_start(disk: Disk, results: Results, prompt_tokens: int, say: Say) -> None:
    files = FILES if prompt_tokens >= PROMPT_TOKENS else FILES // 100
    folder, site = disk.folder / "full", disk.objects.index_site
    tier = DiskTier.parse({"path": str(folder), "gib": 1 << 20})
    tier.open_index(site).close()
    say(f"making {files:,} files")
    for number in range(files):
        shard = folder / OBJECTS / SHARDS[number % len(SHARDS)]
        shard.mkdir(mode=0o700, exist_ok=True)
        with (shard / file_name(f"{shard.name}{secrets.token_hex(31)}", 0)).open("xb") as file:
            file.truncate(disk.objects.object_bytes)
    seconds = []
    for _ in range(SCANS):
        begun = time.perf_counter()
        with closing(tier.open_index(site)) as index:
            while (usage := index.usage()) is None:
                assert time.perf_counter() - begun < HANG_S, "the scan does not end"
            seconds.append(time.perf_counter() - begun)
        assert usage.objects == files
    shutil.rmtree(folder)
    row = Row(
        name=f"start-up scan of {FILES:,} files",
        unit="s",
        target=Target(relation="<", value=2.0),
        samples=seconds,
        note=f"{files:,} files in {len(SHARDS)} folders on {filesystem(disk.folder)}; the kernel's caches hold their "
        "names and sizes, as they were just made",
    )
    say(f"{row.name}: {row.measured()}, {row.verdict()}")
    results.add(row)
