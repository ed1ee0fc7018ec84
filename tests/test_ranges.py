from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstream import ranges
from layerstream.ranges import Ranges

LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


@dataclass
class Attributes:
    message: str
    category: str | None
    payload: int | None = None


@dataclass
class Domain:
    """Has the methods of `nvtx.Domain` and notes what a tool would see."""

    made: list[str] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    depth: int = 0
    started: int = 0

    def get_event_attributes(self, message: str, category: str | None = None) -> Attributes:
        self.made.append(message)
        return Attributes(message, category)

    def push_range(self, attributes: Attributes) -> None:
        self.depth += 1
        self.seen.append((attributes.message, attributes.category, attributes.payload))

    def pop_range(self) -> None:
        self.depth -= 1

    def start_range(self, attributes: Attributes) -> int:
        self.started += 1
        self.seen.append((attributes.message, attributes.payload, self.started))
        return self.started

    def end_range(self, number: int) -> None:
        self.seen.append(("end", number))


def test_a_range_carries_layer_path_and_bytes() -> None:
    domain = Domain()
    marks = Ranges(LAYERS, domain=domain)
    marks.push_load(1, 1, "staged", 4096)
    marks.pop()
    marks.push_save(0, 2, "zero_copy", 1 << 40)
    marks.pop()
    marks.push_wait(2, 2, "graph", 0)
    marks.pop()
    assert domain.seen == [
        ("load model.layers.1.attn", "staged", 4096),
        ("save model.layers.0.attn..model.layers.2.attn", "zero_copy", 1 << 40),
        ("wait model.layers.2.attn", "graph", 0),
    ]
    assert domain.depth == 0


def test_names_are_made_once_however_many_steps_run() -> None:
    domain = Domain()
    marks = Ranges(LAYERS, domain=domain)
    for step in range(50):
        marks.begin_step(step)
        for layer in range(len(LAYERS)):
            marks.push_load(layer, layer, "staged", step * 1000)
            marks.pop()
        marks.end_step()
    assert domain.made == ["step", *(f"load {layer}" for layer in LAYERS)]
    assert [seen[1] for seen in domain.seen if seen[0] == "step"] == list(range(50))
    assert {seen[2] for seen in domain.seen if seen[0] == f"load {LAYERS[0]}"} == {step * 1000 for step in range(50)}


def test_the_same_layer_on_another_path_is_another_range() -> None:
    domain = Domain()
    marks = Ranges(LAYERS, domain=domain)
    marks.push_load(0, 0, "staged", 1)
    marks.push_load(0, 0, "batch_dma", 2)
    assert [(category, payload) for _, category, payload in domain.seen] == [("staged", 1), ("batch_dma", 2)]


def test_a_step_left_open_ends_before_the_next_begins() -> None:
    domain = Domain()
    marks = Ranges(LAYERS, domain=domain)
    marks.begin_step(7)
    marks.begin_step(8)
    marks.end_step()
    marks.end_step()
    assert domain.seen == [("step", 7, 1), ("end", 1), ("step", 8, 2), ("end", 2)]


def test_a_layer_that_does_not_exist_is_refused_while_a_tool_listens() -> None:
    with pytest.raises(IndexError):
        Ranges(LAYERS, domain=Domain()).push_load(0, 3, "staged", 1)


def annotated(profile: torch.profiler.profile, folder: Path) -> list[tuple[str, float, float]]:
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return sorted(
        ((e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"),
        key=lambda event: event[1],
    )


def recorded() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_torchs_profiler_sees_the_same_ranges(tmp_path: Path) -> None:
    marks = Ranges(LAYERS)
    with recorded() as profile:
        enabled = [marks.enabled]
        marks.begin_step(7)
        marks.push_load(0, 2, "staged", 4096)
        torch.ones(3)
        marks.pop()
        marks.push_wait(1, 1, "graph", 5)
        marks.pop()
        marks.end_step()
    assert [*enabled, marks.enabled] == [True, False]
    step, load, wait = (event for event in annotated(profile, tmp_path) if event[0].startswith("layerstream: "))
    assert [event[0] for event in (step, load, wait)] == [
        "layerstream: step [, 7]",
        f"layerstream: load {LAYERS[0]}..{LAYERS[2]} [staged, 4096]",
        f"layerstream: wait {LAYERS[1]} [graph, 5]",
    ]
    assert step[1] <= load[1] < load[2] <= wait[1] < wait[2] <= step[2]


def test_a_profiler_that_starts_or_stops_inside_a_range_pairs_nothing_wrongly(tmp_path: Path) -> None:
    marks = Ranges(LAYERS)
    marks.push_load(0, 0, "staged", 1)
    with recorded() as profile:
        marks.push_load(1, 1, "staged", 1)
        marks.pop()
        marks.pop()
        marks.push_load(2, 2, "staged", 1)
    marks.pop()
    assert marks._annotations == []
    ours = [event[0] for event in annotated(profile, tmp_path) if event[0].startswith("layerstream: ")]
    assert ours[0] == f"layerstream: load {LAYERS[1]} [staged, 1]"


def use_everything(marks: Ranges) -> None:
    marks.begin_step(1)
    marks.push_load(0, 1, "staged", 1)
    marks.pop()
    marks.push_wait(0, 0, "staged", 1)
    marks.pop()
    marks.push_save(0, 0, "staged", 1)
    marks.pop()
    marks.end_step()


def test_without_a_tool_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    marks = Ranges(LAYERS)
    assert not marks.enabled
    use_everything(marks)
    assert marks._attributes == {}


def test_without_nvtx_everything_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    marks = Ranges(LAYERS)
    assert not marks.enabled
    use_everything(marks)


def test_the_module_imports_without_nvtx() -> None:
    script = (
        "import sys; sys.modules['nvtx'] = None; import layerstream.ranges as r; assert not r.Ranges(['a']).enabled"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_listening_tool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain()
    asked: list[str] = []

    class Nvtx:
        @staticmethod
        def get_domain(name: str) -> Domain:
            asked.append(name)
            return domain

    monkeypatch.setitem(sys.modules, "nvtx", Nvtx())
    marks = Ranges(LAYERS)
    assert marks.enabled
    assert asked == [ranges.DOMAIN]
    use_everything(marks)
    assert [seen[0] for seen in domain.seen if seen[0] != "end"] == [
        "step",
        f"load {LAYERS[0]}..{LAYERS[1]}",
        f"wait {LAYERS[0]}",
        f"save {LAYERS[0]}",
    ]
