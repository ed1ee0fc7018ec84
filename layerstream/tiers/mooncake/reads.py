"""Reading objects from memory that other processes contribute, within the time for which the master protects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from layerstream.errors import TierError
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.codes import (
    INVALID_PARAMS,
    INVALID_REPLICA,
    LEASE_EXPIRED,
    MISSING,
    OK,
    meaning,
)
from layerstream.tiers.mooncake.ranges import Range, portions

LEASE_SHARE = 0.8
"""Part of a lease that is used: the master's clock started before the answer came."""
LOST_LEASES = 3
"""Leases in a row that may run out in the first call they cover."""


class SessionReader:
    """Reads objects by sessions: the master says once where objects are and grants a lease, and what is read within the
    lease comes straight from the owners. A session that gets old is started again, and reading goes on where it was.

    Args:
        client: that reads.
        ranges: most pieces in one call.
        lease_s: seconds that the master's leases last (its option default_kv_lease_ttl).
        clock: seconds, never going back.
    """

    def __init__(
        self, client: MooncakeClient, *, ranges: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._ranges, self._lease_s, self._clock = client, ranges, lease_s, clock

    def read(self, names: Sequence[str], wholes: Sequence[Range]) -> int:
        """Read the leading objects that are there.

        Args:
            names: their keys.
            wholes: for each, all its pieces.

        Returns:
            How many.

        Raises:
            TierError: an owner or the master failed, or leases are too short to read anything.
        """
        cuts = [portions(whole, self._ranges) for whole in wholes]
        done = part = lost = 0
        while done < len(names):
            left = names[done:]
            granted_at = self._clock()
            try:
                codes = self._client.start_get(left)
                opened = next((count for count, code in enumerate(codes) if code != OK), len(codes))
                before = (done, part)
                if opened:
                    done, part, code = self._read_on(names[: done + opened], cuts, done, part, granted_at)
                    if code != OK:
                        raise_unless_other_size(self._client, names[done], wholes[done], code)
                        break
                elif codes[0] == INVALID_REPLICA:
                    if not read_whole(self._client, left[:1], wholes[done : done + 1]):
                        break
                    done, part = done + 1, 0
                elif codes[0] in MISSING:
                    break
                elif codes[0] != LEASE_EXPIRED:
                    raise TierError(f"Mooncake Store: looking up object {left[0]} failed: {meaning(codes[0])}")
            finally:
                self._client.end_get(left)
            lost = 0 if (done, part) != before else lost + 1
            if lost == LOST_LEASES:
                raise TierError(
                    f"Mooncake Store: leases ran out {lost} times in a row before {cuts[done][part].nbytes} bytes of "
                    f"object {names[done]} were read; start mooncake_master with a longer --default_kv_lease_ttl"
                )
        return done

    def _read_on(
        self, names: Sequence[str], cuts: Sequence[Sequence[Range]], done: int, part: int, granted_at: float
    ) -> tuple[int, int, int]:
        """Read on from this part of this object while the lease lasts: the object and the part that come next, and what
        that part failed with, if it did."""
        longest = 0.0
        while done < len(names):
            began = self._clock()
            if longest and began + longest - granted_at > LEASE_SHARE * self._lease_s:
                break
            this = cuts[done][part]
            code = self._client.get_range(names[done], this.pointers, this.sizes, this.offsets)
            if code == LEASE_EXPIRED:
                break
            if code != this.nbytes:
                return done, part, code or INVALID_PARAMS
            part += 1
            if part == len(cuts[done]):
                done, part = done + 1, 0
            longest = max(longest, self._clock() - began)
        return done, part, OK


def read_whole(client: MooncakeClient, names: Sequence[str], wholes: Sequence[Range]) -> int:
    """Read the leading objects that are there, by one call, which is fast where they are in this process's own memory.

    Raises:
        TierError: as `SessionReader.read`.
    """
    for retry in range(LOST_LEASES):
        codes = client.get_whole(names, [whole.pointers for whole in wholes], [whole.sizes for whole in wholes])
        good = next((count for count, whole in enumerate(wholes) if codes[count] != whole.nbytes), len(wholes))
        if good == len(wholes) or codes[good] in MISSING:
            return good
        if codes[good] != LEASE_EXPIRED or retry == LOST_LEASES - 1:
            raise_unless_other_size(client, names[good], wholes[good], codes[good])
            return good
    return 0


def raise_unless_other_size(client: MooncakeClient, name: str, whole: Range, code: int) -> None:
    """An object that is longer or shorter than its buffers counts as missing. The codes do not tell it from an owner
    that cannot be reached.

    Raises:
        TierError: it has the right size, or none that the master knows, so reading it failed, with this code.
    """
    size = client.size(name)
    if size < 0 or size == whole.nbytes:
        raise TierError(f"Mooncake Store: reading object {name} failed: {meaning(code)}")
