"""Random programs against a brute-force closure of "comes before"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal, TypeAlias

from hypothesis import assume, given
from hypothesis import strategies as st

from layerstream.streams.base import Event, Stream
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.virtual import VirtualDevice

STREAMS, EVENTS, BYTES = 3, 8, 24
HOST = STREAMS

Bytes: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """One step of a program."""

    kind: Literal["access", "record", "wait", "done"]
    stream: int = 0
    """HOST, for an access, is the host itself."""
    event: int = 0
    reads: tuple[Bytes, ...] = ()
    writes: tuple[Bytes, ...] = ()


spans = st.lists(
    st.tuples(st.integers(0, BYTES - 1), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=2
).map(tuple)
calls = st.one_of(
    st.builds(Call, kind=st.just("access"), stream=st.integers(0, HOST), reads=spans, writes=spans),
    st.builds(
        Call, kind=st.sampled_from(["record", "wait"]), stream=st.integers(0, STREAMS - 1), event=st.integers(0, 2)
    ),
    st.builds(Call, kind=st.just("done"), event=st.integers(0, 2)),
)


def runnable(program: list[Call]) -> list[Call]:
    """Without the uses of events that were never recorded."""
    recorded: set[int] = set()
    kept = []
    for call in program:
        if call.kind == "record":
            recorded.add(call.event)
        elif call.kind != "access" and call.event not in recorded:
            continue
        kept.append(call)
    return kept


def races_found(program: list[Call]) -> set[tuple[int, int]]:
    """Pairs of steps that the device tells of."""
    virtual = VirtualDevice()
    device = RecordingDevice(virtual)
    streams: list[Stream] = [device.compute(), *(device.stream(str(n), priority=0) for n in range(1, STREAMS))]
    events: list[Event] = [device.event() for _ in range(EVENTS)]
    for number, call in enumerate(program):
        if call.kind == "record":
            streams[call.stream].record(events[call.event])
        elif call.kind == "wait":
            streams[call.stream].wait(events[call.event])
        elif call.kind == "done":
            virtual.run()
            assert events[call.event].done()
        elif call.stream == HOST:
            device.host_access(reads=call.reads, writes=call.writes, what=str(number))
        else:
            device.declare(streams[call.stream], reads=call.reads, writes=call.writes, what=str(number))
    return {(int(race.first.what), int(race.second.what)) for race in device.races}


@dataclass
class Order:
    """Which step comes before which, by walking every path."""

    before: list[set[int]] = field(default_factory=list)

    @classmethod
    def of(cls, program: list[Call]) -> Order:
        order = cls()
        last: dict[int, int] = {}
        host: list[int] = []
        recorded: dict[int, int] = {}
        for number, call in enumerate(program):
            direct = set(host)
            if call.kind == "done":
                direct.add(recorded[call.event])
                host.append(number)
            elif call.stream == HOST:
                host.append(number)
            else:
                direct |= {last[call.stream]} if call.stream in last else set()
                direct |= {recorded[call.event]} if call.kind == "wait" else set()
                last[call.stream] = number
                if call.kind == "record":
                    recorded[call.event] = number
            order.before.append(direct.union(*(order.before[earlier] for earlier in direct)))
        return order


def races_there(program: list[Call]) -> set[tuple[int, int]]:
    """Pairs of steps that touch a byte, one of them writing, with neither before the other."""
    before = Order.of(program).before
    touched = [
        tuple({byte for start, end in part for byte in range(start, end)} for part in (call.reads, call.writes))
        for call in program
    ]
    return {
        (i, j)
        for i, j in combinations(range(len(program)), 2)
        if i not in before[j] and (touched[i][1] & (touched[j][0] | touched[j][1]) or touched[i][0] & touched[j][1])
    }


def check(program: list[Call]) -> bool:
    """The device tells of a race exactly where there is one, and of none that is not there."""
    found, there = races_found(program), races_there(program)
    assert found <= there
    assert bool(found) == bool(there)
    return bool(there)


@given(st.lists(calls, max_size=14).map(runnable))
def test_a_random_program_has_the_races_that_are_found(program: list[Call]) -> None:
    check(program)


@st.composite
def ordered_programs(draw: st.DrawFn) -> list[Call]:
    """Programs in which every access waits for those before it that it conflicts with."""
    program: list[Call] = []
    held: list[tuple[Call, int]] = []
    for _ in range(draw(st.integers(2, 8))):
        call = draw(st.builds(Call, kind=st.just("access"), stream=st.integers(0, HOST), reads=spans, writes=spans))
        for earlier, event in held:
            if races_there([replace(earlier, stream=0), replace(call, stream=1)]):
                if earlier.stream != HOST and call.stream == HOST:
                    program.append(Call("done", event=event))
                elif earlier.stream not in {HOST, call.stream}:
                    program.append(Call("wait", call.stream, event))
        program.append(call)
        if call.stream != HOST:
            program.append(Call("record", call.stream, len(held)))
        held.append((call, len(held)))
    return program


@given(ordered_programs())
def test_a_well_ordered_program_has_no_races(program: list[Call]) -> None:
    assert not check(program)


@given(ordered_programs(), st.data())
def test_an_edge_taken_away_is_missed_if_it_was_needed(program: list[Call], data: st.DataObject) -> None:
    edges = [number for number, call in enumerate(program) if call.kind in {"wait", "done"}]
    assume(edges)
    del program[data.draw(st.sampled_from(edges))]
    check(program)
