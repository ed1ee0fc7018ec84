"""Which parts an engine is built from."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layerstream.assembly import _is_zero_copy, build_engine, kv_geometry
from layerstream.config import StreamConfig
from layerstream.errors import ConfigError, GeometryError
from layerstream.geometry import LayerPages

TENSORS = {"layer": torch.zeros(4, 2, 16)}


@pytest.mark.parametrize(
    ("asked", "device", "zero_copy"),
    [
        ("auto", "cpu", True),
        ("staged", "cpu", False),
        ("zero_copy", "cpu", True),
        ("auto", "cuda", False),
        ("staged", "cuda", False),
    ],
)
def test_the_path_follows_option_and_device(asked: str, device: str, zero_copy: bool) -> None:
    config = StreamConfig.from_extra({"transfer_path": asked})
    assert _is_zero_copy(config, device) is zero_copy


def test_zero_copy_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer_path.*'cuda'; use \"auto\" or \"staged\""):
        _is_zero_copy(StreamConfig.from_extra({"transfer_path": "zero_copy"}), "cuda")


@pytest.mark.parametrize(("path", "name"), [("auto", "zero_copy"), ("staged", "staged")])
def test_a_cpu_engine_has_the_path_it_was_asked_for(path: str, name: str) -> None:
    config = StreamConfig.from_extra({"host_gib": 0.001, "transfer_path": path, "staging_mib": 1})
    engine = build_engine(TENSORS, num_blocks=4, block_tokens=2, config=config)
    assert engine._path.name == name
    assert engine.close(5.0)


def test_a_device_without_streams_is_named() -> None:
    tensors = {"layer": torch.zeros(4, 2, 16, device="meta")}
    with pytest.raises(GeometryError, match="'meta' devices cannot be streamed; only cuda and cpu can"):
        build_engine(tensors, num_blocks=4, block_tokens=2, config=StreamConfig.from_extra({"host_gib": 0.001}))


def test_geometry_keeps_the_order_of_the_layers() -> None:
    storage = torch.zeros(2, 4, 8)
    geometry = kv_geometry({"b": storage[1], "a": storage[0]}, num_blocks=4, block_tokens=2)
    assert [layer.name for layer in geometry.layers] == ["b", "a"]
    assert [layer.offset for layer in geometry.layers] == [128, 0]
    assert dataclasses.asdict(geometry)["block_tokens"] == 2


def test_a_trace_folder_that_cannot_be_made_is_one_clear_error(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="trace_dir: /proc/no/such cannot be made"):
        build_engine(
            TENSORS,
            num_blocks=4,
            block_tokens=2,
            config=StreamConfig.from_extra({"host_gib": 0.001, "trace_dir": "/proc/no/such"}),
        )


def test_kernels_are_warmed_up_once_a_layout_and_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerstream.kernels import reference

    warmed: list[tuple[str, list[int]]] = []

    def spy(name: str) -> None:
        real = getattr(reference, name)

        def kernel(dst: torch.Tensor, src: torch.Tensor, layer: LayerPages, blocks: torch.Tensor) -> None:
            warmed.append((name, blocks.tolist()))
            real(dst, src, layer, blocks)

        monkeypatch.setattr(reference, name, kernel)

    spy("gather_pages")
    spy("scatter_pages")
    tensors = {"a": torch.ones(4, 2, 16), "b": torch.ones(4, 2, 16), "wider": torch.ones(4, 2, 32)}
    config = StreamConfig.from_extra({"host_gib": 0.001})
    engine = build_engine(tensors, num_blocks=4, block_tokens=2, config=config)
    assert warmed == 2 * [("gather_pages", [-1]), ("scatter_pages", [-1])]
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    assert engine.close(5.0)
