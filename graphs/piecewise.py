"""Captures a model's forward in pieces around its layer hooks, so that hooks run while everything else replays.

A CUDA graph holds no Python, so one graph of a whole forward would leave the hooks out. Here a hook that is called
through `layerstream.graphs.breaks.run_eagerly` while a `PiecewiseModule` captures ends the graph at hand and begins
the next one in the same memory pool; a replay runs graphs and hooks in turn, all on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from layerstream.errors import ConfigError, GraphError
from layerstream.graphs.breaks import Muted, Pieces, Whole, run_into
from layerstream.graphs.places import Fixtures

if TYPE_CHECKING:
    from layerstream.graphs.capture import GraphApi

Key: TypeAlias = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Bucket, and the inputs that are not padded, by name and shape."""


@dataclass(slots=True, kw_only=True)
class _Captured:
    """One bucket: its input buffers, and what a replay does. Without graphs `parts` is empty and `outputs` unused."""

    buffers: dict[str, torch.Tensor]
    parts: list[Callable[[], None]]
    outputs: Any


class PiecewiseModule:
    """A module replayed from graphs with its hooks in between, for inputs of any number of tokens up to a bucket.

    The module takes tensors by name and returns a tensor, or tuples, lists and dicts of tensors, whose first dimension
    counts tokens. Attach hooks before the first `capture`. Without a graph API the module runs as it is, over the same
    buffers and buckets.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        buckets: Iterable[int],
        pad: Mapping[str, float],
        fixed: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        graph_api: GraphApi | None = None,
        warm_ups: int = 2,
        clone_outputs: bool = False,
        whole: bool = False,
    ) -> None:
        """
        Args:
            module: runs without asking the device for values; what its forward decides in Python stays as it was at
                capture.
            buckets: numbers of tokens to capture; a call takes the smallest that is large enough.
            pad: per input whose first dimension counts tokens, what fills the rest of a bucket. Padded tokens must do
                no harm: a slot of -1 or of a block that nobody reads, say. Other inputs keep the shape of the capture.
            fixed: what the module reads or writes beside its inputs, parameters and buffers, as its KV caches, by name.
            graph_api: captures; None runs without graphs (`layerstream.graphs.capture.graph_api_for`).
            warm_ups: runs before a capture, for kernels that are compiled or tuned on their first.
            clone_outputs: copy outputs out of the graphs' memory; without it they are valid until the next call.
            whole: capture one graph instead of pieces. A hook runs once, in the capture, to put a wait into the graph
                (`layerstream.graphs.in_graph`), and in no replay; there may be none.

        Raises:
            ConfigError: no bucket, or one below 1.
        """
        self._sizes = sorted(set(buckets))
        if not self._sizes or self._sizes[0] < 1:
            raise ConfigError(f"buckets {self._sizes}: name one number of tokens or more, each at least 1")
        self._module = module
        self._pad = dict(pad)
        self._fixed = fixed or dict
        self._api = graph_api
        self._warm_ups = warm_ups
        self._clone = clone_outputs
        self._whole = whole
        self._captured: dict[Key, _Captured] = {}
        self._fixtures: Fixtures | None = None

    def bucket(self, tokens: int) -> int:
        """The bucket for `tokens`.

        Raises:
            ConfigError: larger than every bucket.
        """
        for size in self._sizes:
            if tokens <= size:
                return size
        raise ConfigError(f"{tokens} tokens are more than the largest bucket, {self._sizes[-1]}; split them or add one")

    def is_captured(self, **inputs: torch.Tensor) -> bool:
        """Whether a call with inputs of these shapes replays."""
        return self._key(inputs)[0] in self._captured

    def capture(self, **inputs: torch.Tensor) -> None:
        """Capture the bucket of inputs like these; only their shapes, dtypes and devices count.

        The module runs on `pad` values alone, and no hook runs but in a `whole` capture. On a GPU the first runs may
        block the host.

        Raises:
            ConfigError: inputs do not fit together.
            GraphError: no hook was reached, or something in the module cannot be captured; nothing was kept.
        """
        self._check_fixtures()
        key, _ = self._key(inputs)
        # Ordinary tensors, whichever mode the caller is in: they are written to in any mode later.
        with torch.inference_mode(False), torch.no_grad():
            buffers = {name: self._empty(name, key[0], tensor) for name, tensor in inputs.items()}
        captured = _Captured(buffers=buffers, parts=[], outputs=None)
        if self._api is not None:
            with torch.no_grad(), self._api.aside():
                self._warm_up(buffers)
                self._record(captured, self._api)
            if self._fixtures is None:
                self._fixtures = Fixtures(self._module, self._fixed)
        self._captured[key] = captured

    def _empty(self, name: str, bucket: int, like: torch.Tensor) -> torch.Tensor:
        if name in self._pad:
            return like.new_full((bucket, *like.shape[1:]), self._pad[name])
        return torch.zeros_like(like, memory_format=torch.contiguous_format)

    def _warm_up(self, buffers: dict[str, torch.Tensor]) -> None:
        with run_into(Muted()):
            for _ in range(self._warm_ups):
                self._module(**buffers)

    def _record(self, captured: _Captured, api: GraphApi) -> None:
        try:
            pieces = (Whole if self._whole else Pieces)(api)
            with run_into(pieces):
                captured.outputs = self._module(**captured.buffers)
            pieces.end()
        except Exception as error:
            api.abandon()
            raise GraphError(
                f"{type(self._module).__name__} cannot be captured: {error}; its forward may not ask the device for "
                "values, use other streams, or make tensors on the host"
            ) from error
        if not pieces.breaks and not self._whole:
            raise GraphError(
                f"{type(self._module).__name__} reached no hook while it was captured; attach hooks first "
                "(layerstream.hooks.torch_module.attach)"
            )
        captured.parts = pieces.parts

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run the module, or replay it.

        Returns:
            What the module returns, cut to the tokens given. Valid until the next call, unless `clone_outputs`.

        Raises:
            ConfigError: inputs do not fit together.
            GraphError: these shapes were not captured, or a tensor or a hook changed since.
        """
        key, tokens = self._key(inputs)
        captured = self._captured.get(key)
        if captured is None:
            if self._api is not None:
                raise GraphError(
                    f"inputs of {key[0]} tokens and {self._shapes(key)} were not captured; call capture with inputs "
                    f"like these first (captured: {sorted(self._captured)})"
                )
            self.capture(**inputs)
            captured = self._captured[key]
        self._check_fixtures()
        with torch.no_grad():
            for name, tensor in inputs.items():
                self._fill(captured.buffers[name], tensor, self._pad.get(name))
            for part in captured.parts:
                part()
            outputs = self._module(**captured.buffers) if self._api is None else captured.outputs
        return _cut(outputs, tokens, clone=self._clone)

    def _fill(self, buffer: torch.Tensor, tensor: torch.Tensor, pad: float | None) -> None:
        if tensor.dtype != buffer.dtype or tensor.device != buffer.device or tensor.shape[1:] != buffer.shape[1:]:
            raise ConfigError(
                f"an input is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and was captured as "
                f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}; give it that way"
            )
        count = len(tensor)
        buffer[:count].copy_(tensor, non_blocking=True)
        if pad is not None and count < len(buffer):
            buffer[count:].fill_(pad)

    def forget(self) -> None:
        """Drop what was captured: call it after weights, caches or hooks changed, and capture again.

        No replay may be running on the device.
        """
        self._captured.clear()
        self._fixtures = None

    def _key(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Key, int]:
        missing = sorted(set(self._pad) - set(inputs))
        if missing:
            raise ConfigError(f"inputs {', '.join(missing)} are missing; each call takes all that `pad` names")
        counts = {name: len(inputs[name]) for name in self._pad}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"inputs count different numbers of tokens: {counts}; they must agree")
        tokens = next(iter(counts.values()))
        if tokens < 1:
            raise ConfigError("there are no tokens to run; do not call the module then")
        rest = tuple((name, tuple(inputs[name].shape)) for name in sorted(set(inputs) - set(self._pad)))
        return (self.bucket(tokens), rest), tokens

    @staticmethod
    def _shapes(key: Key) -> str:
        return ", ".join(f"{name} of shape {shape}" for name, shape in key[1]) or "no other inputs"

    def _check_fixtures(self) -> None:
        if self._fixtures is not None:
            self._fixtures.check()


def _cut(outputs: Any, tokens: int, *, clone: bool) -> Any:
    """The rows of the tokens that were given."""
    if isinstance(outputs, torch.Tensor):
        cut = outputs[:tokens]
        return cut.clone() if clone else cut
    if isinstance(outputs, tuple | list):
        cuts = [_cut(each, tokens, clone=clone) for each in outputs]
        return cuts if isinstance(outputs, list) else tuple(cuts)
    if isinstance(outputs, dict):
        return {name: _cut(each, tokens, clone=clone) for name, each in outputs.items()}
    raise GraphError(f"the module returned {type(outputs).__name__}; only tensors, and tuples, lists and dicts of them")
