"""A module in pieces around its hooks, on graphs that show on the CPU what a GPU's would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from layerstream.errors import ConfigError, GraphError
from layerstream.graphs.breaks import run_eagerly
from layerstream.graphs.piecewise import PiecewiseModule
from tests.rigs.fake_graphs import FakeGraphs

WIDTH, LAYERS = 4, 3


class Attention(nn.Module):
    """Reads what lies in its cache at the time, and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache += x.sum(dim=0)
        return x * self.cache


class Model(nn.Module):
    """Tokens see each other, so a wrong pad or a stale row changes every row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for layer, attention in zip(self.layers, self.attention, strict=True):
            x = torch.tanh(layer(x)) * scale
            x = x + x.mean(dim=0)
            x = attention(x) + x
        return x

    def caches(self) -> dict[str, torch.Tensor]:
        return {f"cache {i}": getattr(attention, "cache") for i, attention in enumerate(self.attention)}  # noqa: B009


def hooked(model: Model) -> Model:
    """Before a layer's attention its cache is set, as a load would; after it, what it holds is noted, as by a save."""
    for index, attention in enumerate(model.attention):

        def before(index: int = index) -> None:
            model.caches()[f"cache {index}"].fill_(index + 1.0)

        def after(index: int = index) -> None:
            model.seen.append((index, model.caches()[f"cache {index}"].clone()))

        attention.register_forward_pre_hook(lambda *_, call=before: run_eagerly(call))
        attention.register_forward_hook(lambda *_, call=after: run_eagerly(call))
    return model


def piecewise(model: nn.Module, graphs: FakeGraphs | None, **arguments: Any) -> PiecewiseModule:
    return PiecewiseModule(model, **{"buckets": [2, 8], "pad": {"x": 0.0}, "graph_api": graphs, **arguments})


def rows(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


SCALE = torch.tensor([2.0])


@pytest.fixture
def model() -> Model:
    return hooked(Model())


@pytest.fixture
def graphs() -> FakeGraphs:
    return FakeGraphs()


def expected(model: Model, x: torch.Tensor, bucket: int, scale: torch.Tensor = SCALE) -> tuple[torch.Tensor, list[Any]]:
    """What the module itself does with padded rows."""
    model.seen.clear()
    padded = torch.cat((x, torch.zeros(bucket - len(x), WIDTH)))
    with torch.no_grad():
        out = model(x=padded, scale=scale)[: len(x)].clone()
    seen, model.seen = model.seen, []
    return out, seen


def same(seen: list[Any], wanted: list[Any]) -> bool:
    return len(seen) == len(wanted) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(seen, wanted, strict=True)
    )


@pytest.mark.parametrize("with_graphs", [True, False], ids=["graphs", "no graphs"])
def test_replays_compute_what_the_module_does_and_hooks_run_where_they_stand(
    model: Model, graphs: FakeGraphs, with_graphs: bool
) -> None:
    module = piecewise(model, graphs if with_graphs else None)
    module.capture(x=rows(8), scale=SCALE)
    module.capture(x=rows(2), scale=SCALE)
    # A long input first: what is left of it must not be read with the next.
    for round_, tokens in enumerate((8, 3, 1, 2, 7, 8)):
        x, scale = rows(tokens, round_), torch.tensor([1.0 + round_])
        wanted, wanted_seen = expected(model, x, module.bucket(tokens), scale)
        out = module(x=x, scale=scale)
        assert torch.equal(out, wanted)
        assert same(model.seen, wanted_seen)
    if with_graphs:
        assert len(graphs.pieces) == 2 * (2 * LAYERS + 1)


def test_a_capture_runs_no_hook_and_leaves_caches_to_pads(model: Model, graphs: FakeGraphs) -> None:
    module = piecewise(model, graphs, warm_ups=0)
    before = {name: cache.clone() for name, cache in model.caches().items()}
    module.capture(x=rows(3), scale=SCALE)
    assert model.seen == []
    assert all(torch.equal(cache, before[name]) for name, cache in model.caches().items())
    ran: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: ran.append(args[0].clone()))
    module = piecewise(model, graphs, warm_ups=2)
    module.capture(x=rows(3), scale=SCALE)
    assert len(ran) == 3 and model.seen == []
    assert not any(x.any() for x in ran[:2])


def test_outputs_are_valid_until_the_next_call_unless_cloned(model: Model, graphs: FakeGraphs) -> None:
    for clone in (False, True):
        module = piecewise(model, graphs, clone_outputs=clone)
        module.capture(x=rows(8), scale=SCALE)
        first = module(x=rows(4, 1), scale=SCALE)
        kept = first.clone()
        module(x=rows(4, 2), scale=SCALE)
        assert torch.equal(first, kept) == clone


def test_what_was_not_captured_is_an_error_that_names_the_shapes(model: Model, graphs: FakeGraphs) -> None:
    module = piecewise(model, graphs)
    module.capture(x=rows(8), scale=SCALE)
    assert module.is_captured(x=rows(5), scale=SCALE) and not module.is_captured(x=rows(1), scale=SCALE)
    with pytest.raises(GraphError, match=r"2 tokens and scale of shape \(1,\) were not captured"):
        module(x=rows(1), scale=SCALE)
    with pytest.raises(GraphError, match=r"scale of shape \(4,\)"):
        module(x=rows(8), scale=torch.ones(4))


def test_inputs_that_do_not_fit_are_refused(model: Model, graphs: FakeGraphs) -> None:
    module = piecewise(model, graphs, pad={"x": 0.0, "y": 0.0})
    with pytest.raises(ConfigError, match="inputs y are missing"):
        module(x=rows(1))
    with pytest.raises(ConfigError, match="different numbers of tokens"):
        module(x=rows(1), y=rows(2))
    with pytest.raises(ConfigError, match="no tokens"):
        module(x=rows(0), y=rows(0))
    with pytest.raises(ConfigError, match="9 tokens are more than the largest bucket, 8"):
        module(x=rows(9), y=rows(9))
    with pytest.raises(ConfigError, match="at least 1"):
        piecewise(model, graphs, buckets=[0, 4])
    module = piecewise(model, graphs)
    module.capture(x=rows(2), scale=SCALE)
    for wrong in (rows(2).double(), torch.ones(2, WIDTH + 1)):
        with pytest.raises(ConfigError, match="was captured as"):
            module(x=wrong, scale=SCALE)


def move_weight(model: Model) -> None:
    layer = model.get_submodule("layers.1")
    layer.weight = nn.Parameter(model.get_parameter("layers.1.weight").detach().clone())


def move_data(model: Model) -> None:
    weight = model.get_parameter("layers.1.weight")
    weight.data = weight.data.clone()


def move_cache(model: Model) -> None:
    model.get_submodule("attention.2").cache = torch.zeros(WIDTH)


def add_hook(model: Model) -> None:
    model.get_submodule("attention.0").register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (move_weight, r"layers\.1\.weight moved"),
        (move_data, r"layers\.1\.weight moved"),
        (move_cache, "cache 2 moved"),
        (add_hook, r"hooks of attention\.0 changed"),
    ],
)
def test_what_moved_since_the_capture_is_named_and_can_be_captured_again(
    model: Model, graphs: FakeGraphs, change: Callable[[Model], None], named: str
) -> None:
    module = piecewise(model, graphs, fixed=model.caches)
    module.capture(x=rows(8), scale=SCALE)
    change(model)
    with pytest.raises(GraphError, match=named):
        module(x=rows(8), scale=SCALE)
    with pytest.raises(GraphError, match=named):
        module.capture(x=rows(2), scale=SCALE)
    module.forget()
    module.capture(x=rows(8), scale=SCALE)
    wanted, _ = expected(model, rows(8), 8)
    assert torch.equal(module(x=rows(8), scale=SCALE), wanted)


def test_a_weight_changed_in_place_counts_at_once(model: Model, graphs: FakeGraphs) -> None:
    module = piecewise(model, graphs)
    module.capture(x=rows(8), scale=SCALE)
    before = module(x=rows(8), scale=SCALE).clone()
    with torch.no_grad():
        model.get_parameter("layers.0.weight").mul_(2)
    wanted, _ = expected(model, rows(8), 8)
    out = module(x=rows(8), scale=SCALE)
    assert torch.equal(out, wanted) and not torch.equal(out, before)


class Asking(nn.Module):
    """Asks the device for a value after its first hook."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run_eagerly(lambda: None)
        return x * 2 if self.asks and x.sum().item() >= 0 else x + 1


def test_a_module_that_asks_for_values_cannot_be_captured_and_leaves_nothing_open(graphs: FakeGraphs) -> None:
    asking = Asking()
    module = piecewise(asking, graphs)
    with pytest.raises(GraphError, match=r"Asking cannot be captured: .*not permitted"):
        module.capture(x=rows(2))
    assert graphs.capturing is None and not module.is_captured(x=rows(2))
    asking.asks = False
    module.capture(x=rows(2))
    assert torch.equal(module(x=rows(2)), rows(2) + 1)


def test_a_module_without_hooks_cannot_be_captured(graphs: FakeGraphs) -> None:
    with pytest.raises(GraphError, match="Model reached no hook"):
        piecewise(Model(), graphs).capture(x=rows(2), scale=SCALE)
    assert graphs.capturing is None


def test_a_hook_that_fails_ends_the_call_and_not_the_module(model: Model, graphs: FakeGraphs) -> None:
    fails = [False]

    def fail() -> None:
        if fails[0]:
            raise OSError("lost")

    model.get_submodule("attention.1").register_forward_pre_hook(lambda *_: run_eagerly(fail))
    module = piecewise(model, graphs)
    module.capture(x=rows(8), scale=SCALE)
    fails[0] = True
    with pytest.raises(OSError, match="lost"):
        module(x=rows(8), scale=SCALE)
    assert [index for index, _ in model.seen] == [0]
    fails[0] = False
    wanted, _ = expected(model, rows(8), 8)
    assert torch.equal(module(x=rows(8), scale=SCALE), wanted)


def test_captures_and_calls_mix_inference_mode_and_ordinary_mode(model: Model, graphs: FakeGraphs) -> None:
    module = piecewise(model, graphs)
    wanted, _ = expected(model, rows(8), 8)
    with torch.inference_mode():
        module.capture(x=rows(8), scale=SCALE)
    assert torch.equal(module(x=rows(8), scale=SCALE), wanted)
    with torch.inference_mode():
        assert torch.equal(module(x=rows(8), scale=SCALE), wanted)


def test_a_whole_capture_is_one_graph_with_what_its_hooks_queued(graphs: FakeGraphs) -> None:
    model = hooked(Model())
    module = piecewise(model, graphs, whole=True)
    module.capture(x=rows(8), scale=SCALE)
    assert len(graphs.pieces) == 1 and len(model.seen) == LAYERS
    wanted, _ = expected(model, rows(5), 8)
    # Set by the hooks before each layer, in the graph.
    for cache in model.caches().values():
        cache.fill_(100.0)
    assert torch.equal(module(x=rows(5), scale=SCALE), wanted)
    assert model.seen == []
    bare = piecewise(Model(), graphs, whole=True)
    bare.capture(x=rows(8), scale=SCALE)
    assert bare(x=rows(5), scale=SCALE).shape == (5, WIDTH)


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        run_eagerly(lambda: None)
        return {"pair": (x + 1, [x * 2])}


class Number(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return len(x)


def test_outputs_may_be_nested_and_nothing_else(graphs: FakeGraphs) -> None:
    module = piecewise(Several(), graphs)
    module.capture(x=rows(8))
    out = module(x=rows(3))
    assert torch.equal(out["pair"][0], rows(3) + 1) and torch.equal(out["pair"][1][0], rows(3) * 2)
    with pytest.raises(GraphError, match="returned int"):
        piecewise(Number(), None)(x=rows(3))


class Stale(nn.Module):
    """Reads a tensor made outside the capture, and takes a branch in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = torch.ones(WIDTH)
        self.doubles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run_eagerly(lambda: None)
        return x * self.outside * (2 if self.doubles else 1)


def test_the_stand_in_shows_what_a_capture_would_not_see(graphs: FakeGraphs) -> None:
    stale = Stale()
    module = piecewise(stale, graphs)
    module.capture(x=rows(2))
    assert torch.equal(module(x=rows(2)), rows(2))
    stale.outside, stale.doubles = torch.full((WIDTH,), 5.0), True
    assert torch.equal(module(x=rows(2)), rows(2))
