"""Processes that use a disk tier's folder. Run as a script: it loads little, and can be killed.

disk_writer.py die FOLDER CAP DEATHS         writes, evicts, and is killed amid it, again and again
disk_writer.py share FOLDER CAP ROUNDS SEED  looks objects up, reads and checks what is there, writes what is not
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, IndexSite, Item, StoreSite
from layerstream.tiers.disk.tier import GIB, DiskTier
from layerstream.tiers.objects import Bytes, ObjectFormat, checksum

NAMESPACE = hashlib.blake2b(b"writers", digest_size=32).digest()
BLOCKS, OBJECTS = 4, 48
FORMAT = ObjectFormat(
    layers=[f"layer.{number}" for number in range(4)],
    page_bytes=[16384] * 4,
    chunk_blocks=BLOCKS,
    block_tokens=16,
    rank=0,
)
OBJECT_BYTES = FORMAT.nbytes(BLOCKS)


def named(number: int) -> TierObject:
    key = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
    return TierObject(key=key, parent=b"", start=0, blocks=BLOCKS)


class Writer:
    """Both ends of the tier, with memory for one object."""

    def __init__(self, folder: Path, cap_bytes: int) -> None:
        tier = DiskTier.parse({"path": str(folder), "gib": cap_bytes / GIB})
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, OBJECT_BYTES), dtype=np.uint8)
        self.index = tier.open_index(
            IndexSite(
                namespace=NAMESPACE,
                chunk_blocks=BLOCKS,
                block_bytes=(FORMAT.block_bytes,),
                header_bytes=(FORMAT.header_bytes,),
            )
        )
        self.store = tier.open_store(StoreSite(format=FORMAT, memory=(self.memory,)))

    def batch(self, each: TierObject) -> Batch:
        cuts = [*FORMAT.layer_offsets(BLOCKS), OBJECT_BYTES]
        layers = tuple((self.memory[lo:hi],) for lo, hi in itertools.pairwise(cuts))
        item = Item(object=each, header=self.memory[: FORMAT.header_bytes], layers=layers)
        return Batch(namespace=NAMESPACE, chain=(), items=(item,))

    def write(self, each: TierObject) -> bool:
        if self.index.reserve([each]) != (True,):
            return False
        batch = self.batch(each)
        item = batch.items[0]
        self.memory[FORMAT.header_bytes :] = np.resize(
            np.frombuffer(each.key, dtype=np.uint8), OBJECT_BYTES - FORMAT.header_bytes
        )
        sums = [checksum(pieces) for pieces in item.layers]
        FORMAT.write_header(item.header, each, namespace=NAMESPACE, checksums=sums)
        written = self.store.write(batch) == 1
        self.index.settle([each], written=written)
        return written

    def read(self, each: TierObject) -> bool:
        """Whether it was there; it is checked then."""
        batch = self.batch(each)
        if not self.store.read(batch):
            return False
        FORMAT.check(each, batch.items[0].header, batch.items[0].layers, namespace=NAMESPACE)
        assert bytes(self.memory[FORMAT.header_bytes :]) == each.key * (FORMAT.block_bytes * BLOCKS // 32)
        return True


AMID_WRITE = 5
"""More deaths than that are to fall into a write."""


def die(folder: Path, cap_bytes: int, deaths: int) -> dict[str, int]:
    draw = random.Random(1)
    amid_write = death = 0
    # On a busy machine few writers get as far as a write in their time.
    while death < deaths or (amid_write <= AMID_WRITE and death < 4 * deaths):
        death += 1
        child = os.fork()
        if not child:
            _write_for_ever(folder, cap_bytes, death)
        time.sleep(draw.uniform(0.004, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # The next writer removes them.
        amid_write += any(folder.glob("v1/*/.*.tmp"))
    return {"amid_write": amid_write}


def _write_for_ever(folder: Path, cap_bytes: int, seed: int) -> NoReturn:
    writer, draw = Writer(folder, cap_bytes), random.Random(seed)
    while True:
        writer.write(named(draw.randrange(1 << 40)))


def share(folder: Path, cap_bytes: int, rounds: int, seed: int) -> dict[str, int]:
    writer, draw = Writer(folder, cap_bytes), random.Random(seed)
    counts = {"found": 0, "read": 0, "written": 0}
    for _ in range(rounds):
        each = named(draw.randrange(OBJECTS))
        found = writer.index.find([each])
        if found.present == (True,):
            counts["found"] += 1
            counts["read"] += writer.read(each)
        else:
            counts["written"] += writer.write(each)
        writer.index.release(found.ticket)
    return counts


if __name__ == "__main__":
    mode, place, *numbers = sys.argv[1:]
    run: Callable[..., dict[str, int]] = die if mode == "die" else share
    sys.stdout.write(json.dumps(run(Path(place), *map(int, numbers))))
