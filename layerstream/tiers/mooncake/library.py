"""Mooncake's Python package, imported with limits that keep a dead peer from holding a thread for minutes.

Mooncake has no limits per client or call: it reads them from the environment, once for the whole process. So they are
set before the package is imported, where the user has not set them, and the first tier of a process decides them.
"""

from __future__ import annotations

import importlib
import math
import os
from importlib.util import find_spec
from typing import Any

from layerstream.errors import ConfigError

LONGEST_TRANSFER_S = 60.0
"""Mooncake gives a transfer up after this time whatever the environment says (`wait_for_completion` in its
transfer_task.cpp), without stopping it."""


_STOPS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
"""What a transfer is stopped after. Whoever moved bytes uses their memory again after a failure."""


def limits(timeout_s: float) -> dict[str, str]:
    """The variables and their values for a tier with this option `timeout_s`."""
    seconds, milliseconds = str(math.ceil(timeout_s / 2)), str(math.ceil(timeout_s * 1000))
    return {
        # To the master: for one answer, and for one attempt to connect.
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(min(timeout_s, 1.0) * 1000)),
        # A transfer is stopped (and no longer reads or writes memory) after so long without progress. Half the limit,
        # since a call may have to wait for two that follow each other.
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        # Otherwise each piece opens a connection: 512 pieces take seconds instead of milliseconds, and a machine runs
        # out of ports.
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        # What waits for one of a peer's connections fails together after so long, not one after the other once it is
        # its turn: 130 pieces to a peer that hangs took over a minute.
        "MC_TCP_ADMISSION_TIMEOUT_MS": milliseconds,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "4",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        # `setup` holds the GIL, so it is tried once at a time. The client tries again later.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": "WARNING",
    }


def load_library(timeout_s: float) -> Any:
    """The module `mooncake.store`.

    Args:
        timeout_s: option of the tier. Without effect if a tier of this process was opened before with another.

    Raises:
        ConfigError: it is not installed, cannot be loaded, or was told to wait too long.
    """
    if find_spec("mooncake") is None:
        raise ConfigError(
            "the package mooncake is not installed; pip install 'layerstream[mooncake]' (or, on a machine without "
            "CUDA, mooncake-transfer-engine-non-cuda)"
        )
    for name, value in limits(timeout_s).items():
        os.environ.setdefault(name, value)
    ranges_per_call()
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        hint = "; apt-get install libibverbs1" if "libibverbs" in str(error) else ""
        raise ConfigError(f"the package mooncake cannot be loaded: {error}{hint}") from error


def ranges_per_call() -> int:
    """Most ranges of an object in one call: so many that a call to an owner that hangs ends before the library gives it
    up. It moves them one after another, and stops each after its time limit.

    Raises:
        ConfigError: a time limit is too long for that.
    """
    longest = 0
    for name in _STOPS:
        value = os.environ[name]
        if not (value.isdecimal() and 0 < int(value) < LONGEST_TRANSFER_S):
            raise ConfigError(
                f"environment variable {name} is {value!r}; allowed: whole seconds from 1 to "
                f"{LONGEST_TRANSFER_S - 1:.0f}, or unset"
            )
        longest = max(longest, int(value))
    return int(LONGEST_TRANSFER_S - 1) // longest
