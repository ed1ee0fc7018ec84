"""The file in which an engine's rates outlive it: one for each machine, model and geometry.

A cache and no more: a file that is missing or damaged costs a few requests that are decided without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from layerstream.rates import Rates

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the file's form; a file of another version counts as absent."""
WRITE_EVERY_S = 600.0
"""Least time between two writes while the engine runs: what a crash may lose."""
MOST_BYTES = 4 << 20
"""A file that is larger is none of ours."""


class RateStore:
    """Keeps `rates` in a file of `folder`. Nothing it does ends in an error.

    Args:
        rates: what is kept; told what the file holds.
        folder: where files are.
        machine: names the device.
        model: names the model, its layout and its ranks (`Namespace.digest()`).
        clock: seconds, never going back.
    """

    def __init__(self, rates: Rates, folder: Path, *, machine: str, model: bytes, clock: Callable[[], float]) -> None:
        identity = json.dumps([machine, model.hex()]).encode()
        self.path = folder / f"learned-{hashlib.blake2b(identity, digest_size=8).hexdigest()}.json"
        self._rates = rates
        self._clock = clock
        self._written_at = clock()
        self._changes = rates.changes
        self._warned = False
        self._read()

    def step(self) -> None:
        """Write if that was long ago and much was learned."""
        if self._rates.changes != self._changes and self._clock() - self._written_at >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write what is known well enough, at once or not at all."""
        self._written_at = self._clock()
        if self._rates.changes == self._changes:
            return
        self._changes = self._rates.changes
        state = self._rates.state()
        if not state:
            return
        temporary: Path | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".learned-")
            temporary = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "rates": state}, file)
            temporary.replace(self.path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            self._warn("what was learned of this machine's rates cannot be kept: %s", error)

    def _read(self) -> None:
        try:
            with self.path.open(encoding="utf-8") as file:
                data = json.loads(file.read(MOST_BYTES))
            if data["version"] == VERSION:
                self._rates.restore(data["rates"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._warn("%s is not used, and rates are learned anew: %r", self.path, error)

    def _warn(self, text: str, *args: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("LayerStream: %s", text % args)
