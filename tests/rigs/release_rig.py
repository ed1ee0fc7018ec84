"""The scheduler rig whose loads stop before a layer until a test lets them go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerstream.coordinator import Coordinator
from layerstream.decisions import LoadMode
from layerstream.flights import Flight
from layerstream.jobs import JobKind, StepPlan
from tests.rigs.fixed_choice import FixedChoice
from tests.rigs.late_scheduler_rig import LateSchedulerRig

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from layerstream.streams.virtual import VirtualDevice


class Eager:
    """Stands in for an adversary: whatever can run has run."""

    def run(self, device: VirtualDevice) -> None:
        device.run()

    def run_some(self, device: VirtualDevice) -> None:
        device.run()


class ReleaseRig(LateSchedulerRig):
    """See `LateSchedulerRig`. Every hit is loaded as `choice` says, and devices run all that can run at once."""

    def __init__(self, folder: Path, *, options: dict[str, Any], **arguments: Any) -> None:
        super().__init__(folder, seed=0, options={"transfer_path": "staged", **options}, **arguments)
        self._adversaries: list[Any] = [Eager() for _ in self.devices]
        self.choice = FixedChoice(LoadMode.PARKED, release=0)
        self.coordinator._chooser = self.choice
        self.stops: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(self.devices)), ())
        """Rank -> layers before each of which its next loads stop."""
        self._going_on: list[list[Callable[[], None]]] = [[] for _ in self.devices]
        self.plans: list[tuple[SchedulerOutput, StepPlan | None]] = []
        """Of every step so far."""
        for rank, engine in enumerate(self.engines):
            path: Any = engine._paths._loads[0]
            path.load = self._stopping(rank, path.load)

    @property
    def coordinator(self) -> Coordinator:
        coordinator: Coordinator | None = self.connector.scheduler._coordinator
        assert coordinator is not None
        return coordinator

    @property
    def loads(self) -> list[Flight]:
        """Parked loads that not every rank has ended, oldest first."""
        flights = self.coordinator._flights
        every = (*flights._overdue.values(), *flights._due.values())
        return [flight for flight in every if flight.job.kind is JobKind.PARKED_LOAD]

    def stop_before(self, *layers: int, rank: int | None = None) -> None:
        """Loads that are queued from here on stop before each of `layers`, on a rank or on all."""
        self.stops.update(dict.fromkeys(self.stops if rank is None else (rank,), layers))

    def go_on(self, rank: int | None = None, *, stops: int | None = None) -> None:
        """Loads go on, on a rank or on all; past the next few stops, or past all of them and no more are made."""
        for its in self.stops if rank is None else (rank,):
            if stops is None:
                self.stops[its] = ()
            for go in self._going_on[its][:stops]:
                go()
            del self._going_on[its][:stops]

    def step(self) -> SchedulerOutput:
        output = super().step()
        for device in self.devices:
            device.run()
        assert not self.wrong, self.wrong[0]
        return output

    def steps(self, count: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(count)]

    def behind(self, rank: int = 0) -> bool:
        """Whether the model waits for something on a rank."""
        return bool(self.devices[rank]._compute.pending)

    def _forward(self, rank: int, output: SchedulerOutput) -> Any:
        if rank == 0:
            self.plans.append((output, output.kv_connector_metadata.plan))
        return super()._forward(rank, output)

    def _stopping(self, rank: int, load: Callable[..., None]) -> Callable[..., None]:
        def stopping(layers: Any, move: Any, **events: Any) -> None:
            if layers[0] in self.stops[rank]:
                device = self.devices[rank]
                (copies,) = (stream for stream in device._streams if stream.name == "layerstream-load-copy")
                self._going_on[rank].append(device.hold(copies))
            load(layers, move, **events)

        return stopping
