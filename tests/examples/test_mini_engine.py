"""The engine without vLLM: what it serves, and that it would show a gate that is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.rigs.fake_graphs import FakeGraphs

SCRIPT = Path(__file__).parents[2] / "examples" / "mini_engine.py"
PROMPT = [int(token) for token in torch.randint(0, 512, (75,), generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module")
def mini() -> Iterator[ModuleType]:
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("mini_engine", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while the script is read.
    sys.modules["mini_engine"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    # Teams of threads that wait for each other are slow on a busy machine, and nothing here is large.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(mini: ModuleType) -> Iterator[Callable[..., Any]]:
    made = []

    def build(**arguments: Any) -> Any:
        model = mini.MiniLlama.random(mini.LlamaShape(), seed=1, device=torch.device("cpu"), dtype=torch.float32)
        options = {"host_gib": 0.01, "chunk_tokens": 16, **arguments.pop("options", {})}
        engine = mini.MiniEngine(
            model, **{"num_blocks": 96, "block_tokens": 8, "step_tokens": 32, **arguments}, options=options
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def hold_loads(engine: Any) -> threading.Event:
    """Keep every stream that copies from going on until the event that is returned is set."""
    release = threading.Event()
    for stream in engine.streamer.device._streams:
        stream.launch(lambda: release.wait(60) or None)
    return release


@pytest.mark.parametrize("path", ["zero_copy", "staged"])
def test_warm_logits_are_those_of_a_local_hit_bit_for_bit(make: Callable[..., Any], path: str) -> None:
    engine = make(options={"transfer_path": path})
    cold = engine.serve_cold(PROMPT)
    assert cold.stats.save_blocks == 75 // 8
    local = engine.serve_local_hit(PROMPT, tail_tokens=3)
    warm = engine.serve_warm(PROMPT, tail_tokens=3)
    assert warm.hit_tokens == local.hit_tokens == 72
    assert torch.equal(warm.logits, local.logits)
    assert torch.allclose(warm.logits, cold.logits, atol=1e-5)
    assert warm.stats.load_blocks == 9
    assert warm.stats.overlap_ratio is not None
    assert local.stats.load_blocks == 0
    assert len(warm.step_seconds) == 1 and len(cold.step_seconds) == 3


def test_a_gate_that_is_skipped_makes_logits_differ(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.serve_cold(PROMPT)
    local = engine.serve_local_hit(PROMPT)
    before, after = engine.gate.before, engine.gate.after

    def late_but_gated(name: str) -> None:
        release.set()
        before(name)

    def ungated(name: str) -> None:
        if name != "layers.0":
            before(name)

    def read_first(name: str) -> None:
        release.set()
        after(name)

    for hook, replaced, equal in (("before", late_but_gated, True), ("before", ungated, False)):
        with monkeypatch.context() as patch:
            patch.setattr(engine.gate, hook, replaced)
            patch.setattr(engine.gate, "after", read_first)
            engine.hooks.remove()
            engine.hooks = attached(engine)
            release = hold_loads(engine)
            warm = engine.serve_warm(PROMPT)
        assert torch.equal(warm.logits, local.logits) == equal


def attached(engine: Any) -> Any:
    from layerstream.hooks.torch_module import attach

    engine.module.forget()
    return attach(engine.model, engine.gate, {f"layers.{i}.attention": f"layers.{i}" for i in range(4)})


def test_pieces_that_are_replayed_give_the_same_bits(
    mini: ModuleType, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = FakeGraphs()
    monkeypatch.setattr(mini, "graph_api_for", lambda _: graphs)
    plain, replayed = make(), make(graphs=True)
    for serve in ("serve_cold", "serve_local_hit", "serve_warm"):
        served = getattr(replayed, serve)(PROMPT)
        assert torch.equal(served.logits, getattr(plain, serve)(PROMPT).logits), serve
    assert served.stats.load_blocks == 9
    assert torch.equal(replayed.decode(7).logits, plain.decode(7).logits)
    # A piece for each layer's attention, and one between each two, in each of the shapes.
    assert len(graphs.pieces) % 9 == 0 and min(piece.replays for piece in graphs.pieces) > 0


def test_one_graph_of_everything_waits_for_whole_loads_and_gives_the_same_bits(
    mini: ModuleType, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = FakeGraphs()
    monkeypatch.setattr(mini, "graph_api_for", lambda _: graphs)
    plain, replayed = make(), make(graphs=True, whole=True)
    for serve in ("serve_cold", "serve_local_hit", "serve_warm"):
        served = getattr(replayed, serve)(PROMPT)
        assert torch.equal(served.logits, getattr(plain, serve)(PROMPT).logits), serve
    assert served.stats.load_blocks == 9
    assert len(graphs.pieces) == 4


class CapturedWaits:
    """In-graph gates that note the layers, and never arm."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.asked = 0

    def capture_wait(self, layer: int) -> None:
        self.layers.append(layer)

    def try_arm(self, compute: Any) -> bool:
        self.asked += 1
        return False


def test_waits_are_put_into_a_whole_graph_while_it_is_captured_and_armed_for_a_load(
    mini: ModuleType, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, build = CapturedWaits(), mini.build_engine

    def build_with_waits(*args: Any, **kwargs: Any) -> Any:
        streamer = build(*args, **kwargs)
        streamer.in_graph = waits
        return streamer

    monkeypatch.setattr(mini, "build_engine", build_with_waits)
    monkeypatch.setattr(mini, "graph_api_for", lambda _: FakeGraphs())
    engine = make(graphs=True, whole=True)
    engine.serve_cold(PROMPT)
    assert waits.layers == [0, 1, 2, 3] * 3 and waits.asked == 0
    local = engine.serve_local_hit(PROMPT)
    captured = list(waits.layers)
    assert torch.equal(engine.serve_warm(PROMPT).logits, local.logits)
    assert waits.layers == captured and waits.asked == 1


def test_a_tail_of_several_steps_waits_in_its_first(make: Callable[..., Any]) -> None:
    engine = make()
    engine.serve_cold(PROMPT)
    local, warm = engine.serve_local_hit(PROMPT, tail_tokens=50), engine.serve_warm(PROMPT, tail_tokens=50)
    assert warm.hit_tokens == 24 and len(warm.step_seconds) == 2
    assert torch.equal(warm.logits, local.logits)


def test_decoding_goes_on_alike_from_restored_and_from_computed_kv(make: Callable[..., Any]) -> None:
    engine = make()
    engine.serve_cold(PROMPT)
    engine.serve_local_hit(PROMPT)
    local, after_local = engine.decode(10), list(engine.requests[0].tokens)
    engine.serve_warm(PROMPT)
    warm = engine.decode(10)
    assert torch.equal(warm.logits, local.logits)
    assert engine.requests[0].tokens == after_local and len(after_local) == len(PROMPT) + 10


def test_decoding_appends_what_a_prompt_of_the_same_tokens_would_give_next(make: Callable[..., Any]) -> None:
    engine = make()
    # With larger weights a token depends on those before it, and does not repeat itself.
    for weight in engine.model.parameters():
        weight.mul_(4)
    engine.serve_cold(PROMPT)
    decoded = engine.decode(5)
    tokens = engine.requests[0].tokens
    assert len(set(tokens[len(PROMPT) :])) > 2
    for length in range(len(PROMPT), len(tokens)):
        served = engine.serve_cold(tokens[:length], save=False)
        assert int(served.logits.argmax()) == tokens[length]
        engine.requests.pop()
    assert torch.allclose(engine.serve_cold(tokens, save=False).logits, decoded.logits, atol=1e-3)


def test_blocks_that_fill_while_decoding_can_be_saved(make: Callable[..., Any]) -> None:
    engine = make()
    engine.serve_cold(PROMPT)
    assert engine.decode(6, save=True).stats.save_blocks == 1
    assert engine.decode(6).stats.save_blocks == 0


def test_a_batch_gives_each_sequence_what_it_would_get_alone(make: Callable[..., Any]) -> None:
    others = [PROMPT[:20], PROMPT[5:60]]
    together, tokens = make(), []
    for prompt in others:
        together.serve_cold(prompt)
    together.decode(4)
    for prompt in others:
        alone = make()
        alone.serve_cold(prompt)
        alone.decode(4)
        tokens.append(alone.requests[0].tokens)
    assert [request.tokens for request in together.requests] == tokens


def test_what_padded_tokens_write_is_never_read(make: Callable[..., Any]) -> None:
    engine = make()
    clean = engine.serve_cold(PROMPT)
    engine.caches[:, 0] = 50.0
    assert torch.equal(engine.serve_cold(PROMPT).logits, clean.logits)


def test_the_model_computes_what_transformers_does(mini: ModuleType, tiny_llama: Path) -> None:
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = mini.MiniLlama.load(tiny_llama, device=torch.device("cpu"), dtype=torch.float32)
    engine = mini.MiniEngine(model, num_blocks=20, block_tokens=8, step_tokens=32, options={"host_gib": 0.05})
    served = engine.serve_cold(PROMPT)
    with torch.no_grad():
        wanted = expected(torch.tensor([PROMPT])).logits[0, -1]
    assert torch.allclose(served.logits, wanted, atol=1e-4)
    engine.close()


def test_what_cannot_be_served_is_said(make: Callable[..., Any]) -> None:
    engine = make()
    with pytest.raises(RuntimeError, match="not served cold"):
        engine.serve_warm(PROMPT)
    engine.serve_cold(PROMPT, save=False)
    with pytest.raises(RuntimeError, match="not saved"):
        engine.serve_warm(PROMPT)
    with pytest.raises(RuntimeError, match="leaves no full block"):
        engine.serve_local_hit(PROMPT, tail_tokens=70)
    with pytest.raises(RuntimeError, match="blocks are needed"):
        engine.serve_cold(PROMPT * 10)
    engine.forget()
    assert len(engine._free) == 95


TINY = ("--device", "cpu", "--prompt-tokens", "60", "--step-tokens", "32", "--repeats", "1", "--host-gib", "0.01")


def test_the_command_prints_what_was_measured(mini: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert mini.main([*TINY, "--layers", "2", "--decode", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bit_equal"] is True
    assert result["hit_tokens"] == 32
    assert 0 <= result["overlap_ratio"] <= 1
    assert mini.main(TINY) == 0
    assert "overlap_ratio" in capsys.readouterr().out


def test_the_command_fails_when_bits_differ(
    mini: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(engine: Any, request: Any) -> None:
        engine.streamer.pool.span(1, request.pool_page, 1).zero_()

    monkeypatch.setattr(mini.MiniEngine, "wipe", damage)
    assert mini.main([*TINY, "--json"]) == 1
    assert "differ" in capsys.readouterr().err
