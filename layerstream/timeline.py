"""The timeline of one layerwise load: when each layer travelled, when its gate was passed, when it was computed.

Seconds since the load was submitted, taken from device events. Written in the Chrome trace event format, which
Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer of a load."""

    layer: str
    load_begin: float
    load_end: float
    gate_begin: float
    """The compute stream arrived at the layer's gate."""
    gate_end: float
    """It went on; what lies between is exposed stall."""
    compute_end: float
    """It arrived at the next layer's gate, or at the end of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A gated load and the compute it hid behind."""

    step: int
    requests: tuple[str, ...]
    blocks: int
    nbytes: int
    layers: tuple[LayerTimes, ...]

    @property
    def load_seconds(self) -> float:
        """See `busy_seconds`."""
        return busy_seconds((times.load_begin, times.load_end) for times in self.layers)

    @property
    def stall_seconds(self) -> float:
        """Time the compute stream waited at gates."""
        return sum(t.gate_end - t.gate_begin for t in self.layers)

    @property
    def overlap_ratio(self) -> float:
        """1 - exposed stall / load time, clipped at 0."""
        return max(0.0, 1.0 - self.stall_seconds / self.load_seconds) if self.load_seconds > 0 else 0.0

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline as a Chrome trace object; durations in microseconds, as that format has them."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in ((1, "load"), (2, "gate"), (3, "compute"))
        ]
        for times in self.layers:
            for tid, name, begin, end in (
                (1, "load", times.load_begin, times.load_end),
                (2, "wait", times.gate_begin, times.gate_end),
                (3, "compute", times.gate_end, times.compute_end),
            ):
                events.append(
                    {
                        "ph": "X",
                        "pid": 1,
                        "tid": tid,
                        "name": f"{name} {times.layer}",
                        "ts": begin * 1e6,
                        "dur": max(0.0, end - begin) * 1e6,
                    }
                )
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": asdict(self)}

    def write(self, folder: Path, rank: int) -> Path:
        """Write `load-<step>-rank<rank>.json` into `folder` at once or not at all; returns its path.

        Raises:
            OSError: the folder cannot be written.
        """
        target = folder / f"load-{self.step:06d}-rank{rank}.json"
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".load-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self.chrome_trace(), file)
        Path(temporary).replace(target)
        return target


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Time in which at least one of some (begin, end) spans was under way.

    A load's parts follow each other, some of them queued only when the model is near: from the first begin to the last
    end there may be time that is the model's alone.
    """
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy


def read_timeline(path: Path) -> Timeline:
    """Read a file that `Timeline.write` wrote.

    Raises:
        ValueError: the file is not such a trace; the message names it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["otherData"]
        layers = tuple(LayerTimes(**times) for times in data.pop("layers"))
        return Timeline(**{**data, "requests": tuple(data["requests"])}, layers=layers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no timeline of a layerwise load ({error!r})") from error
