"""What the numbers mean that Mooncake Store answers with.

Names as in `ErrorCode` of its mooncake-store/include/types.h (0.3.13), meanings as seen there and by running it.
"""

from __future__ import annotations

OK = 0
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
INVALID_REPLICA = -702
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
RPC_FAIL = -900
RPC_TIMEOUT = -901

_CODES: dict[int, tuple[str, str]] = {
    -1: ("INTERNAL_ERROR", "an error inside Mooncake; its own log says more"),
    -10: ("BUFFER_OVERFLOW", "a buffer is too small"),
    -101: ("SEGMENT_NOT_FOUND", "the memory that held the object is gone"),
    -102: ("SEGMENT_ALREADY_EXISTS", "this process has contributed its memory already"),
    -103: ("CLIENT_NOT_FOUND", "the master does not know this client (any more)"),
    NO_AVAILABLE_HANDLE: ("NO_AVAILABLE_HANDLE", "no memory is free, and none could be evicted"),
    -400: ("INVALID_KEY", "the key cannot be used"),
    -500: ("WRITE_FAIL", "writing failed"),
    INVALID_PARAMS: ("INVALID_PARAMS", "its sizes are others, its session is over, or its owner cannot be reached"),
    -601: ("ILLEGAL_CLIENT", "another client's object"),
    INVALID_REPLICA: ("INVALID_REPLICA", "the object is not in memory, but on an owner's disk"),
    -703: ("REPLICA_IS_NOT_READY", "somebody is still writing the object"),
    OBJECT_NOT_FOUND: ("OBJECT_NOT_FOUND", "there is no such object"),
    OBJECT_ALREADY_EXISTS: ("OBJECT_ALREADY_EXISTS", "the object exists, or somebody is writing it"),
    -706: ("OBJECT_HAS_LEASE", "somebody may be reading the object"),
    LEASE_EXPIRED: ("LEASE_EXPIRED", "the object may have been evicted while it was read"),
    -710: ("REPLICA_NOT_FOUND", "the object is gone"),
    -712: ("REPLICA_IS_GONE", "the object is gone"),
    -714: ("OBJECT_REPLICA_BUSY", "the object is being moved or removed"),
    -800: ("TRANSFER_FAIL", "bytes did not get to the memory that holds the object, or from there"),
    -801: ("CHECKSUM_MISMATCH", "Mooncake's own checksum of the object does not fit its bytes"),
    RPC_FAIL: ("RPC_FAIL", "the master does not answer: it is down, or cannot be reached"),
    RPC_TIMEOUT: ("RPC_TIMEOUT", "the master took longer than MC_RPC_TIMEOUT_MS to answer"),
}

MISSING = frozenset({OBJECT_NOT_FOUND, -703, -710, -712, -714})
"""Objects that cannot be read because they are not there, or not yet, or not any more."""
MASTER_ILL = frozenset({RPC_FAIL, RPC_TIMEOUT})
"""The master did not answer."""
TRANSFER_FAILED = frozenset({-1, -500, -800})
"""Bytes may have been on their way."""


def meaning(code: int) -> str:
    """A code as a message says it: number, name, and what it means."""
    name, what = _CODES.get(code, ("", ""))
    return f"{code} {name} ({what})" if name else f"{code} (not a code that layerstream knows)"
