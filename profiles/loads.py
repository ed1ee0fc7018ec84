"""The loads of a recording, layer by layer: what each took, what was computed meanwhile, and what it held up.

The numbers of one layer, or of one group of layers that has one gate, derived alike from every kind of trace:

- *load*: from the first begin to the last end of the device work that was queued inside its range `load LAYER`.
- *gate*: its range `wait LAYER` in the same step, in which the host makes the compute stream wait for that load;
  several where a load of many layers, as one graph is, has a gate for each. The compute stream is the one stream with
  most work queued during steps, load and save ranges left out.
- *compute*: busy time of the compute stream's work queued between this gate and the next one, or the end of the step.
- *exposed stall*: the part of the compute stream's idle gap at the gate in which this load was not yet there. The gap
  goes from `a`, the end of the last work queued on the stream before the gate, to `b`, the begin of the first work
  queued after it. The stream waits from max(a, host's arrival at the gate), since what the host has not queued does
  not wait; until min(b, end of the load), since a later begin has another reason. Where several gates share a gap, no
  moment is counted twice: it belongs to the first gate.

overlap ratio = 1 - exposed stall / load time, both summed over steps; the load time of a step is that in which at least
one of its loads was under way (`layerstream.timeline.busy_seconds`). A timeline has its gates from device events: there
the stall is the time between the events before and after the gate. A load without gates (parked, or waited for by nodes
inside a CUDA graph) counts for the rate and not for the ratio.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from layerstream.errors import ConfigError
from layerstream.ranges import SEPARATOR
from layerstream.timeline import Timeline, busy_seconds
from profiles.traces import Mark, Trace, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer, or group, of one load; seconds."""

    label: str
    nbytes: int
    begin: float
    end: float
    compute: float | None
    stall: float | None
    """None for both: it has no gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of one step on one rank."""

    step: int | None
    layers: tuple[LayerLoad, ...]

    @property
    def gated(self) -> bool:
        """Whether every layer has a gate."""
        return all(layer.stall is not None for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Time in which at least one layer was under way."""
        return busy_seconds((layer.begin, layer.end) for layer in self.layers)

    @property
    def stall(self) -> float:
        """Exposed stall over all layers."""
        return sum(layer.stall or 0.0 for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes over all layers."""
        return sum(layer.nbytes for layer in self.layers)


def overlap_ratio(loads: Sequence[Load]) -> float | None:
    """1 - exposed stall / load time over the gated loads, clipped at 0; None if there are none."""
    gated = [load for load in loads if load.gated]
    seconds = sum(load.seconds for load in gated)
    return max(0.0, 1.0 - sum(load.stall for load in gated) / seconds) if seconds > 0 else None


def timeline_load(timeline: Timeline) -> Load:
    """A timeline in the form of a load; bytes are spread evenly, as a timeline has only their sum."""
    count = len(timeline.layers)
    return Load(
        step=timeline.step,
        layers=tuple(
            LayerLoad(
                label=times.layer,
                nbytes=timeline.nbytes // count + (index < timeline.nbytes % count),
                begin=times.load_begin,
                end=times.load_end,
                compute=times.compute_end - times.gate_end,
                stall=times.gate_end - times.gate_begin,
            )
            for index, times in enumerate(timeline.layers)
        ),
    )


class _ComputeStream:
    """The work of one stream, in the order in which it was queued."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = sorted(work, key=lambda each: each.queued)
        self._queued = [each.queued for each in self._work]
        self._ends = list(itertools.accumulate((each.end for each in self._work), max))
        begins = itertools.accumulate((each.begin for each in reversed(self._work)), min)
        self._begins = list(begins)[::-1]
        self._counted_until = float("-inf")

    def stall(self, gate: Mark, load_end: float) -> float:
        """Exposed stall at `gate`. Ask in the order of gates, and at one gate in the order of loads."""
        before, after = bisect.bisect_left(self._queued, gate.begin), bisect.bisect_left(self._queued, gate.end)
        begin = max(gate.begin, self._ends[before - 1] if before else gate.begin, self._counted_until)
        end = min(load_end, self._begins[after] if after < len(self._begins) else load_end)
        self._counted_until = max(self._counted_until, end)
        return max(0.0, end - begin)

    def busy(self, begin: float, end: float) -> float:
        """Seconds of the work that was queued from `begin` until before `end`."""
        first, last = bisect.bisect_left(self._queued, begin), bisect.bisect_left(self._queued, end)
        return sum(each.end - each.begin for each in self._work[first:last])


def trace_loads(trace: Trace, stream: int | None = None) -> list[Load]:
    """Every load that was queued inside a step.

    Args:
        trace: what was recorded.
        stream: the number of the compute stream, if the one with most work is not it.

    Raises:
        ConfigError: no load inside a step has device work, or there is no such stream.
    """
    threads: dict[Hashable, list[Mark]] = defaultdict(list)
    for mark in sorted(trace.marks, key=lambda each: each.begin):
        threads[mark.thread].append(mark)
    loads: list[Load] = []
    for thread, marks in threads.items():
        process = marks[0].process
        queued = sorted((each for each in trace.work if each.thread == thread), key=lambda each: each.queued)
        steps = [mark for mark in marks if mark.what == "step"]
        ours = {id(work) for mark in marks if mark.what in {"load", "save"} for work in _inside(queued, mark)}
        others = [each for each in trace.work if each.process == process and id(each) not in ours]
        compute = _compute_stream(others, steps, stream)
        begins = [mark.begin for mark in marks]
        for step in steps:
            inside = marks[bisect.bisect_left(begins, step.begin) : bisect.bisect_left(begins, step.end)]
            loads += _step_loads(step, inside, queued, compute)
    if not loads:
        raise ConfigError(
            "no step of the recording has a load with device work: record longer, or a step that hits the host pool"
        )
    return loads


class _Steps:
    """When steps ran; those of one thread do not overlap."""

    def __init__(self, steps: Sequence[Mark]) -> None:
        self._begins = [step.begin for step in steps]
        self._ends = [step.end for step in steps]

    def hold(self, moment: float) -> bool:
        index = bisect.bisect_right(self._begins, moment) - 1
        return index >= 0 and moment < self._ends[index]


def _inside(queued: Sequence[Work], mark: Mark) -> Sequence[Work]:
    first = bisect.bisect_left(queued, mark.begin, key=lambda each: each.queued)
    return queued[first : bisect.bisect_right(queued, mark.end, key=lambda each: each.queued)]


def _compute_stream(others: Sequence[Work], steps: Sequence[Mark], stream: int | None) -> _ComputeStream | None:
    streams: dict[tuple[int, ...], list[Work]] = defaultdict(list)
    for work in others:
        streams[work.stream].append(work)
    if stream is not None:
        chosen = [key for key in streams if key[-1] == stream]
        if not chosen:
            there = sorted({key[-1] for key in streams})
            raise ConfigError(
                f"--stream {stream}: the recording has no such stream beside those of loads; it has {there}"
            )
    else:
        chosen = list(streams)

    windows = _Steps(steps)

    def busy(key: tuple[int, ...]) -> float:
        return sum(work.end - work.begin for work in streams[key] if windows.hold(work.queued))

    best = max(chosen, key=busy, default=None)
    return None if best is None or (stream is None and busy(best) == 0) else _ComputeStream(streams[best])


def _step_loads(
    step: Mark, marks: Sequence[Mark], queued: Sequence[Work], compute: _ComputeStream | None
) -> Iterator[Load]:
    rounds: list[dict[str, tuple[Mark, Sequence[Work]]]] = []
    start = None
    for mark in marks:
        if mark.what != "load":
            continue
        # Every load is queued from its first layer on: the gated one first, parked ones follow.
        first = mark.label.split(SEPARATOR)[0]
        if start is None or first == start:
            start = first
            rounds.append({})
        if work := _inside(queued, mark):
            rounds[-1][mark.label] = mark, work
    for number, found in enumerate(rounds):
        gates = _gates(list(found), [mark for mark in marks if mark.what == "wait"]) if number == 0 else {}
        if found:
            yield Load(step=step.payload, layers=tuple(_layers(step, found, gates, compute)))


def _gates(labels: Sequence[str], waits: Sequence[Mark]) -> dict[str, list[Mark]]:
    """The waits of each load, in order; labels come in the order of layers.

    A wait names a layer, or first and last of several. A layer inside a group is not part of the group's name: its wait
    belongs to the group whose wait came before.
    """
    places = {name: index for index, label in enumerate(labels) for name in label.split(SEPARATOR)}
    gates: dict[str, list[Mark]] = defaultdict(list)
    latest: int | None = None
    for wait in waits:
        names = wait.label.split(SEPARATOR)
        first = places.get(names[0], latest)
        if first is None:
            continue
        latest = places.get(names[-1], first)
        for label in labels[first : latest + 1]:
            gates[label].append(wait)
    return gates


def _layers(
    step: Mark,
    found: dict[str, tuple[Mark, Sequence[Work]]],
    gates: dict[str, list[Mark]],
    compute: _ComputeStream | None,
) -> Iterator[LayerLoad]:
    labels = list(found)
    for index, (label, (mark, work)) in enumerate(found.items()):
        end = max(each.end for each in work)
        stall = busy = None
        if label in gates and compute is not None:
            stall = sum(compute.stall(gate, end) for gate in gates[label])
            later = next((gates[other][0].begin for other in labels[index + 1 :] if other in gates), step.end)
            busy = compute.busy(gates[label][0].end, later)
        yield LayerLoad(
            label=label,
            nbytes=sum(each.nbytes for each in work) if mark.payload is None else mark.payload,
            begin=min(each.begin for each in work),
            end=end,
            compute=busy,
            stall=stall,
        )
