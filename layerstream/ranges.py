"""Profiler ranges of a worker half: what the host queued for which layer, by which path, and how many bytes.

For Nsight Systems they are NVTX ranges of the domain `layerstream`. A range is named after what it queues: `load
LAYER`, `save LAYER`, `wait LAYER`, or `load FIRST..LAST` for a group of layers; its category is the name of the
transfer path and its payload the bytes. `step` spans a step with work, with the step's number as payload. Names are
registered once per layer or group and path, so the tool stores each of them once; nothing that changes from step to
step is part of a name. Nsight Systems shows a row `layerstream` under the thread that runs the model, with category and
payload in a range's tooltip, and the same ranges projected onto the GPU's rows, around what was queued inside them.

PyTorch's profiler does not see NVTX. While it records, the same ranges are annotations `layerstream: load LAYER [path,
bytes]` in its trace, which keeps every name of its own anyway.

The host's ranges only say when work was queued; `profiles/overlap.py` finds the device work queued inside them, in
either trace, and says when it ran. While nothing records, a range costs about 0.2 us. Whether an NVTX tool listens is
asked once, when `Ranges` is made: such a tool injects itself at the start of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DOMAIN = "layerstream"
SEPARATOR = ".."
"""Between the first and the last layer of a group."""


def layers_label(first: str, last: str) -> str:
    """How a group of consecutive layers is named in ranges: one name, or first and last."""
    return first if first == last else f"{first}{SEPARATOR}{last}"


def annotation_name(what: str, path: str, payload: int) -> str:
    """How a range is named in a trace of PyTorch's profiler, which has neither categories nor payloads."""
    return f"{DOMAIN}: {what} [{path}, {payload}]"


def listening_domain() -> Any | None:
    """The nvtx domain, or None where nvtx is not installed or no tool listens."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    # A domain that nobody listens to is a stand-in of nvtx's, which makes no attributes.
    return domain if domain.get_event_attributes(message="step") is not None else None


class Ranges:
    """The ranges of one engine. Used by one thread: the one that runs the model."""

    __slots__ = ("_annotations", "_attributes", "_domain", "_layers", "_open_step", "_step", "_torch")

    def __init__(self, layers: Sequence[str], *, domain: Any | None = None) -> None:
        """
        Args:
            layers: the engine's layer names, in its order.
            domain: an `nvtx.Domain`; None asks whether a tool listens.
        """
        from torch.autograd import profiler

        self._layers = tuple(layers)
        self._torch: Any = profiler
        self._domain: Any = listening_domain() if domain is None else domain
        self._step: Any = None if self._domain is None else self._domain.get_event_attributes(message="step")
        self._attributes: dict[tuple[str, int, int, str], Any] = {}
        self._annotations: list[Any] = []
        self._open_step: tuple[int | None, Any] | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything records at this moment."""
        return self._domain is not None or self._torch._is_profiler_enabled

    def begin_step(self, step: int) -> None:
        """Open the range of a step with work; one left open, by a step that raised, ends here.

        It is a start/end range and not a pushed one: a step that ends early cannot unbalance the ranges of layers.
        """
        if self._open_step is not None:
            self.end_step()
        if self._domain is None and not self._torch._is_profiler_enabled:
            return
        number = None
        if self._domain is not None:
            self._step.payload = step
            number = self._domain.start_range(self._step)
        self._open_step = number, self._annotate("step", "", step)

    def end_step(self) -> None:
        """Close the step's range, if one is open."""
        if self._open_step is None:
            return
        (number, annotation), self._open_step = self._open_step, None
        if number is not None:
            self._domain.end_range(number)
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def push_load(self, first: int, last: int, path: str, nbytes: int) -> None:
        """Open the range in which a load of the layers `first` to `last` is queued. Close it with `pop`.

        Args:
            first: index of the first layer.
            last: index of the last one, which belongs to the group.
            path: name of the transfer path.
            nbytes: bytes moved, over all layers of the group.

        Raises:
            IndexError: there is no such layer; only seen while something records.
        """
        self._push("load", first, last, path, nbytes)

    def push_save(self, first: int, last: int, path: str, nbytes: int) -> None:
        """As `push_load`, for a save."""
        self._push("save", first, last, path, nbytes)

    def push_wait(self, first: int, last: int, path: str, nbytes: int) -> None:
        """As `push_load`, for the gate at which the compute stream is made to wait for these layers."""
        self._push("wait", first, last, path, nbytes)

    def pop(self) -> None:
        """Close the range opened last. To be called in a `finally`, as an open range would swallow what follows."""
        if self._domain is not None:
            self._domain.pop_range()
        # Pushed also while nothing records, so that a profiler that starts in between pairs nothing wrongly.
        annotation = self._annotations.pop()
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _push(self, what: str, first: int, last: int, path: str, nbytes: int) -> None:
        if self._domain is None and not self._torch._is_profiler_enabled:
            self._annotations.append(None)
            return
        name = f"{what} {layers_label(self._layers[first], self._layers[last])}"
        if self._domain is not None:
            attributes = self._attributes.get((what, first, last, path))
            if attributes is None:
                attributes = self._domain.get_event_attributes(message=name, category=path)
                self._attributes[what, first, last, path] = attributes
            attributes.payload = nbytes
            self._domain.push_range(attributes)
        self._annotations.append(self._annotate(name, path, nbytes))

    def _annotate(self, what: str, path: str, payload: int) -> Any:
        if not self._torch._is_profiler_enabled:
            return None
        annotation = self._torch.record_function(annotation_name(what, path, payload))
        annotation.__enter__()
        return annotation
