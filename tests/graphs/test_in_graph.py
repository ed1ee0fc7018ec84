"""Waits inside a FULL graph, on a stand-in for CUDA that replays in every order the events and words allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch

from layerstream.graphs.in_graph import EventGates, FlagGates, InGraphGates
from layerstream.graphs.wait_probe import captured_waits
from layerstream.streams.base import Event, Stream
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda

LAYERS, NBYTES = 4, 8


class Model:
    """A model of layers that read their KV, captured in one graph as vLLM would; and a load stream that writes it."""

    def __init__(self, api: FakeCuda, make: Callable[[CudaDevice], InGraphGates]) -> None:
        self.api = api
        self.device = CudaDevice(0, api=api)
        # The model's stream is not CUDA's default one, which cannot be captured.
        self.raw = api.Stream()
        self._entered = api.stream(self.raw)
        self._entered.__enter__()
        self.compute = self.device.compute()
        self.load: Any = self.device.stream("load", priority=1)
        self.kv = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self.read = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self.gates = make(self.device)
        self.results: list[tuple[int, torch.Tensor]] = []
        self.graph = self.capture(range(LAYERS))
        api.run()

    def capture(self, layers: Any) -> Any:
        graph = self.api.CUDAGraph()
        graph.capture_begin()
        attend = self.api.kernel(_copy)
        for layer in layers:
            self.gates.capture_wait(layer)
            attend(self.read[layer], self.kv[layer])
        graph.capture_end()
        return graph

    def replay(self, value: int) -> None:
        """Launch the graph; `value` is what every layer should have read."""
        self.graph.replay()
        result = torch.empty(LAYERS, dtype=torch.uint8)
        self.api.kernel(lambda: _copy(result, torch.stack([read[0] for read in self.read])))()
        self.results.append((value, result))

    def idle_step(self, value: int) -> None:
        before = len(self.api.log)
        self.replay(value)
        assert [entry.call for entry in self.api.log[before:]] == ["replay", "launch"]

    def load_step(self, value: int, *, launch: bool = True, finish: bool = True, layers: int = LAYERS) -> bool:
        """As the engine's: arm, submit, launch, and let nothing later pass the load."""
        armed = self.gates.try_arm(self.compute)
        submitted = self.device.event()
        self.compute.record(submitted)
        self.load.wait(submitted)
        ends = []
        for layer in range(layers):
            self.load.copy(self.kv[layer], torch.full((NBYTES,), value, dtype=torch.uint8))
            ends.append(self.device.event())
            self.load.record(ends[-1])
            if armed:
                self.gates.open(layer, ends[-1])
        if not armed:
            for end in ends:
                self.compute.wait(end)
        if launch:
            self.replay(value)
        for end in ends:
            self.compute.wait(end)
        if armed and finish:
            self.gates.end_step(self.compute)
        return armed

    def run(self, seed: int) -> None:
        self.api.run(random.Random(seed).choice)

    def stuck(self) -> bool:
        return any(stream.pending for stream in self.api.streams)

    def right(self) -> bool:
        return all(result.tolist() == [value] * LAYERS for value, result in self.results)


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def flags(device: CudaDevice) -> FlagGates:
    return FlagGates(device, LAYERS, device.driver())


def events(device: CudaDevice) -> EventGates:
    return EventGates(device, LAYERS)


def launch_events(device: CudaDevice) -> EventGates:
    return EventGates(device, LAYERS, waits="launch")


Waits = Literal["live", "launch"]
WAYS: list[tuple[Callable[[CudaDevice], InGraphGates], Waits]] = [
    (flags, "live"),
    (flags, "launch"),
    (events, "live"),
    (events, "launch"),
    (launch_events, "launch"),
]
every_way = pytest.mark.parametrize(("make", "waits"), WAYS, ids=[f"{make.__name__}-{waits}" for make, waits in WAYS])


@every_way
def test_every_step_reads_its_own_load_whatever_is_in_flight(
    make: Callable[[CudaDevice], InGraphGates], waits: Waits
) -> None:
    for seed in range(60):
        with FakeCuda() as api:
            api.graph_waits = waits
            model = Model(api, make)
            choices = random.Random(seed)
            value = 0
            for _ in range(6):
                if choices.random() < 0.6:
                    value += 1
                    model.load_step(value)
                else:
                    model.idle_step(value)
                # The host is at times behind the device, at times steps ahead of it.
                if choices.random() < 0.3:
                    model.run(seed)
            model.run(seed)
            assert not model.stuck() and model.right(), seed


@every_way
def test_a_layer_reads_before_later_layers_have_arrived(
    api: FakeCuda, make: Callable[[CudaDevice], InGraphGates], waits: Waits
) -> None:
    api.graph_waits = waits
    model = Model(api, make)
    copy = model.load.copy
    holds: list[Callable[[], None]] = []

    def late(dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst is model.kv[2]:
            with api.stream(model.load.raw):
                holds.append(api.hold())
        copy(dst, src)

    model.load = _With(model.load, copy=late)
    assert model.load_step(7)
    api.run()
    assert [int(read[0]) for read in model.read] == [7, 7, 0, 0]
    holds[0]()
    api.run()
    assert model.right() and not model.stuck()


class _With:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_flags_arm_while_earlier_steps_are_in_flight(api: FakeCuda) -> None:
    model = Model(api, flags)
    model.idle_step(0)
    assert [model.load_step(1), model.load_step(2)] == [True, True]
    api.run()
    assert model.right() and not model.stuck()


def test_events_do_not_arm_while_any_earlier_step_is_in_flight(api: FakeCuda) -> None:
    model = Model(api, events)
    assert [model.load_step(1), model.load_step(2)] == [True, False]
    api.run()
    assert model.load_step(3)
    api.run()
    model.idle_step(3)
    assert not model.load_step(4)
    api.run()
    assert model.right() and not model.stuck()


def test_events_that_look_at_launch_arm_while_earlier_steps_are_in_flight(api: FakeCuda) -> None:
    model = Model(api, launch_events)
    assert [model.load_step(1), model.load_step(2)] == [True, True]
    api.run()
    assert model.right() and not model.stuck()


@every_way
def test_gates_are_not_armed_before_every_capture_had_every_layer(
    api: FakeCuda, make: Callable[[CudaDevice], InGraphGates], waits: Waits
) -> None:
    model = Model(api, make)
    assert model.gates.captured_whole()
    model.capture(range(LAYERS))
    assert model.gates.captured_whole()
    model.capture(range(LAYERS - 1))
    assert not model.gates.captured_whole()
    before = len(api.log)
    assert not model.gates.try_arm(model.compute)
    assert len(api.log) == before
    model.capture(range(LAYERS))
    assert not model.gates.captured_whole(), "what one graph lacks, another does not make good"


@every_way
@pytest.mark.parametrize("layers", [(), (1, 2, 3), (0, 2, 1, 3), (0, 0, 1, 2, 3)])
def test_a_capture_without_a_layer_or_out_of_order_is_not_whole(
    api: FakeCuda, make: Callable[[CudaDevice], InGraphGates], waits: Waits, layers: tuple[int, ...]
) -> None:
    model = Model(api, make)
    model.gates = make(model.device)
    model.capture(layers)
    assert not model.gates.captured_whole()


@every_way
@pytest.mark.parametrize("submitted", [0, 2])
def test_a_step_that_breaks_off_holds_nothing_up(
    make: Callable[[CudaDevice], InGraphGates], waits: Waits, submitted: int
) -> None:
    for seed in range(20):
        with FakeCuda() as api:
            api.graph_waits = waits
            model = Model(api, make)
            # Not every layer is submitted, and the forward is not launched; the next steps are as any other.
            model.load_step(1, launch=False, layers=submitted)
            model.load_step(2)
            model.idle_step(2)
            model.run(seed)
            # A graph that was launched although some layers' loads were not submitted ends too.
            model.load_step(3, layers=submitted)
            model.results.pop()
            model.load_step(4)
            model.run(seed)
            assert not model.stuck() and model.right(), seed


def test_a_step_that_was_not_ended_is_ended_by_the_next() -> None:
    for seed in range(30):
        with FakeCuda() as api:
            model = Model(api, flags)
            model.load_step(1, launch=False, finish=False, layers=1)
            model.load_step(5)
            model.run(seed)
            assert not model.stuck() and model.right(), seed


@every_way
def test_ending_a_step_that_was_not_armed_queues_nothing(
    api: FakeCuda, make: Callable[[CudaDevice], InGraphGates], waits: Waits
) -> None:
    model = Model(api, make)
    before = len(api.log)
    model.gates.end_step(model.compute)
    assert len(api.log) == before


# What goes wrong without each of the precautions.


class AlwaysArmed(EventGates):
    def try_arm(self, compute: Stream) -> bool:
        return True


class UnorderedOpen(FlagGates):
    def open(self, layer: int, done: Event) -> None:
        self._open(layer)


class UnjoinedFlags(FlagGates):
    def end_step(self, compute: Stream) -> None:
        self._armed = False


class NeverClosed(FlagGates):
    def try_arm(self, compute: Stream) -> bool:
        return True


def outcomes(make: Callable[[CudaDevice], InGraphGates], waits: Waits, steps: Callable[[Model], None]) -> set[str]:
    found = set()
    for seed in range(80):
        with FakeCuda() as api:
            api.graph_waits = waits
            model = Model(api, make)
            steps(model)
            model.run(seed)
            found.add("stuck" if model.stuck() else "right" if model.right() else "wrong bytes")
    return found


def two_loads(model: Model) -> None:
    model.load_step(1)
    model.load_step(2)


def load_behind_an_idle_step(model: Model) -> None:
    model.load_step(1)
    model.api.run()
    model.idle_step(1)
    model.load_step(2)


def load_after_one_that_was_not_launched(model: Model) -> None:
    model.load_step(1, launch=False)
    model.load_step(2)


@pytest.mark.parametrize("steps", [two_loads, load_behind_an_idle_step])
def test_events_recorded_anew_under_a_running_graph_lock_up_if_waits_are_live(steps: Callable[[Model], None]) -> None:
    def careless(device: CudaDevice) -> EventGates:
        return AlwaysArmed(device, LAYERS)

    assert outcomes(careless, "live", steps) == {"stuck"}
    assert outcomes(careless, "launch", steps) == {"right"}
    assert outcomes(events, "live", steps) == {"right"}


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [
        (UnorderedOpen, two_loads),
        (NeverClosed, two_loads),
        (UnjoinedFlags, load_after_one_that_was_not_launched),
    ],
)
def test_flags_without_a_precaution_show_wrong_bytes_in_some_order(
    wrong: type[FlagGates], steps: Callable[[Model], None]
) -> None:
    def careless(device: CudaDevice) -> FlagGates:
        return wrong(device, LAYERS, device.driver())

    assert "wrong bytes" in outcomes(careless, "launch", steps)
    assert outcomes(flags, "launch", steps) == {"right"}


@pytest.mark.parametrize("waits", ["live", "launch"])
def test_the_probe_tells_when_captured_waits_look(api: FakeCuda, waits: Waits) -> None:
    api.graph_waits = waits
    device = CudaDevice(0, api=api)
    assert captured_waits(device, device.driver(), patience_s=0.01, pause=lambda _: api.run()) == waits
    assert not any(stream.pending for stream in api.streams)
