"""Fingerprints of every block saved and restored (option `verify`): source == stored == restored, or an error.

For debugging and for tests: it reads blocks back to the host at the end of the step and blocks the model thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerstream.errors import TransferTimeout, VerifyError
from layerstream.jobs import JobKind

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry
    from layerstream.host_pool import HostPool
    from layerstream.jobs import TierJob
    from layerstream.streams.base import Device
    from layerstream.transfers import Transfer

DEADLINE_S = 60.0
"""A transfer that takes longer hangs."""


class Verifier:
    """Remembers what every pool page was saved from, and compares it with what is loaded."""

    def __init__(
        self,
        *,
        device: Device,
        geometry: KVGeometry,
        storages: Sequence[torch.Tensor],
        pool: HostPool,
        gather: Callable[..., None],
        saves: bool = True,
    ) -> None:
        """
        Args:
            device: where the KV cache lives.
            geometry: its pages.
            storages: per layer, `uint8` over the layer's whole storage.
            pool: the host pool.
            gather: `gather_pages` for this device.
            saves: whether this rank saves; what another one saved for it has no fingerprint here, and only pool and KV
                cache are compared.
        """
        self._device = device
        self._geometry = geometry
        self._storages = storages
        self._pool, self._saves = pool, saves
        self._gather = gather
        import xxhash

        self._hash = xxhash.xxh3_64
        self._groups = geometry.groups
        self._saved: dict[tuple[int, int], int] = {}
        """KV cache group and page -> fingerprint of what was saved there."""
        self._promoted: set[tuple[int, int]] = set()
        """KV cache groups and pages whose bytes came from a tier, where their checksums were compared."""
        self.compared = dict.fromkeys(JobKind, 0)
        """Blocks compared so far, by the kind of job that moved them."""

    def check(self, transfers: Sequence[Transfer]) -> int:
        """Wait for `transfers` and compare every block of them. Returns the number of blocks compared.

        Raises:
            VerifyError: a block's bytes differ; the message names request, block and pool page.
            TransferTimeout: a transfer did not end.
        """
        deadline = time.monotonic() + DEADLINE_S
        for transfer in transfers:
            while not transfer.finished():
                if time.monotonic() > deadline:
                    raise TransferTimeout(f"requests {', '.join(transfer.requests)}: not done after {DEADLINE_S:g} s")
                time.sleep(0.0005)
        compared = 0
        for transfer in transfers:
            for job in transfer.jobs:
                for group, moved in enumerate(job.groups):
                    pages = [first + i for first, count in moved.pool_runs for i in range(count)]
                    for block, page in zip(moved.block_ids, pages, strict=True):
                        self._compare(job.kind, job.request_id, group, block, page)
                        self.compared[job.kind] += 1
                        compared += 1
        return compared

    def promoted(self, jobs: Sequence[TierJob]) -> None:
        """Tiers bring other bytes into these jobs' pages than were saved there before."""
        for job in jobs:
            if job.kind is JobKind.PROMOTE:
                pages = (first + i for first, count in job.pool_runs for i in range(count))
                self._promoted.update(itertools.product(range(len(self._groups)), pages))

    def _compare(self, kind: JobKind, request: str, group: int, block: int, page: int) -> None:
        # A pipeline stage may have no layer of a group.
        layers, place = self._groups[group] if group < len(self._groups) else (), (group, page)
        cached, stored = self._block_fingerprint(layers, block), self._page_fingerprint(layers, page)
        if kind is JobKind.SAVE:
            self._saved[place] = cached
            self._promoted.discard(place)
        known = self._saves and place not in self._promoted
        expected = self._saved.get(place) if known else stored
        if cached == stored == expected:
            return
        what = "saved" if kind is JobKind.SAVE else "restored"
        raise VerifyError(
            f"request {request}: block {block} was {what} with other bytes than pool page {page} should hold "
            f"(when saved {expected}, in the pool {stored}, in the KV cache {cached}); "
            "please report this with the engine's layout and versions"
        )

    def _block_fingerprint(self, layers: Sequence[int], block: int) -> int:
        digest = self._hash()
        table = self._device.table([block])
        for layer in layers:
            pages = self._geometry.layers[layer]
            packed = self._device.empty(pages.page_bytes)
            self._gather(packed, self._storages[layer], pages, table)
            digest.update(packed.cpu().numpy().data)
        return digest.intdigest()

    def _page_fingerprint(self, layers: Sequence[int], page: int) -> int:
        digest = self._hash()
        for layer in layers:
            digest.update(self._pool.span(layer, page, 1).numpy().data)
        return digest.intdigest()
