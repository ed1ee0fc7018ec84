"""Which engines are started for a model, and with what."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from layerstream.hooks.vllm.register import NAME
from profiles.gpu_serve.models import NAMES, Model, NotRun

PLAIN, LAYERSTREAM, OFFLOADING = "plain", "layerstream", "offloading"
IN_GRAPH = "in-graph"
SYSTEMS = (PLAIN, LAYERSTREAM, OFFLOADING)

GRAPH_MODE = "FULL_AND_PIECEWISE"
CUDA_BLOCK_TOKENS = 16
PROMPTS_KEPT = 3
"""Longest prompts that the KV cache and the host pool have room for: the one that is hit, and cold ones beside it."""
LEAST_HOST_GIB = 0.25
LOADED = {"load_mode": "layerwise", "recompute": "never"}
"""Of LayerStream, whose loads are measured: also where this machine was found to be quicker without."""
EXACT_PROMPTS, ANSWER_TOKENS = 2, 16
"""Prompts whose logprobs are compared, and tokens of their answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is asked to do."""

    tokens: tuple[int, ...]
    rounds: int
    budget_s: float
    only: str | None
    systems: tuple[str, ...]
    in_graph: str | None
    backend: str | None
    gpu_blocks: int | None
    gpu_memory_utilization: float | None
    batched_tokens: int
    host_gib: float | None
    decode_prompt: int
    decode_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSpec:
    """One engine and what it measures. Systems of one model differ in connector and options alone."""

    name: str
    model: str
    dummy: bool
    vocabulary: int
    max_model_len: int
    lengths: tuple[int, ...]
    rounds: int
    decode_prompt: int
    decode_tokens: int
    connector: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Its `kv_connector_extra_config`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The spec that `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "lengths": tuple(values["lengths"])})


def plan_systems(settings: Settings, model: Model, *, cuda: bool) -> list[SystemSpec | NotRun]:
    """The systems of one model, in the order in which they run."""
    lengths = tuple(length for length in settings.tokens if length + ANSWER_TOKENS <= model.positions)
    if not lengths:
        reason = f"{model.name} takes {model.positions} tokens with its answer, and --tokens names none below"
        return [NotRun(name=name, reason=reason) for name in settings.systems]
    longest = max(*lengths, settings.decode_prompt + settings.decode_tokens)
    max_model_len = min(model.positions, longest + 2 * ANSWER_TOKENS)
    element_bytes = 2 if cuda else 4
    pool_bytes = PROMPTS_KEPT * longest * model.kv_elements * element_bytes
    host_gib = settings.host_gib or max(LEAST_HOST_GIB, round(pool_bytes / 2**30, 3))
    arguments: dict[str, Any] = {"skip_tokenizer_init": True}
    if model.dummy:
        arguments["load_format"] = "dummy"
    if cuda:
        arguments |= {
            "num_gpu_blocks_override": settings.gpu_blocks or -(-PROMPTS_KEPT * longest // CUDA_BLOCK_TOKENS),
            "max_num_batched_tokens": settings.batched_tokens,
            "compilation_config": {"cudagraph_mode": GRAPH_MODE},
        }
        if settings.gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.backend is not None:
        arguments["attention_backend"] = settings.backend

    def spec(name: str, connector: str | None, **options: Any) -> SystemSpec:
        return SystemSpec(
            name=name,
            model=str(model.folder),
            dummy=model.dummy,
            vocabulary=model.vocabulary,
            max_model_len=max_model_len,
            lengths=lengths,
            rounds=settings.rounds,
            decode_prompt=settings.decode_prompt,
            decode_tokens=settings.decode_tokens,
            connector=connector,
            options=options,
            arguments=arguments,
        )

    known: dict[str, SystemSpec | NotRun] = {
        PLAIN: spec(PLAIN, None),
        LAYERSTREAM: spec(LAYERSTREAM, NAME, host_gib=host_gib, **LOADED),
        OFFLOADING: spec(OFFLOADING, "OffloadingConnector", cpu_bytes_to_use=int(host_gib * 2**30)),
    }
    if not cuda:
        known[OFFLOADING] = NotRun(name=OFFLOADING, reason="vLLM's OffloadingConnector refuses vLLM's CPU build")
    systems = [known[name] for name in settings.systems]
    if settings.in_graph is not None:
        if cuda:
            systems.append(spec(IN_GRAPH, NAME, host_gib=host_gib, **LOADED, in_graph_waits=settings.in_graph))
        else:
            systems.append(NotRun(name=IN_GRAPH, reason="waits inside CUDA graphs need a GPU"))
    return systems


def parse_arguments(arguments: list[str] | None, *, cuda: bool) -> tuple[Settings, Path]:
    """Read the command line; returns the settings and the folder for the results."""
    parser = argparse.ArgumentParser(
        prog="python -m profiles.gpu_serve",
        description="vLLM served with LayerStream, without it, and with vLLM's OffloadingConnector, one engine after "
        "another; results are written after each.",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-serve"), help="folder for table, JSON and logs")
    parser.add_argument("--only", choices=NAMES, help="one model; default: what this machine can serve")
    parser.add_argument("--systems", type=_systems, default=SYSTEMS, help="comma-separated, of " + ", ".join(SYSTEMS))
    parser.add_argument("--tokens", type=_lengths, default=(4096, 32768) if cuda else (1024,), help="prompt lengths")
    parser.add_argument("--rounds", type=_positive, default=10, help="samples of each number; a verdict takes 6")
    parser.add_argument("--budget-s", type=_seconds, default=240.0 if cuda else 900.0, help="longest life of an engine")
    parser.add_argument("--in-graph", choices=("flags", "events"), help="one more engine, with waits in FULL graphs")
    parser.add_argument("--backend", choices=("TRITON_ATTN", "FLASH_ATTN"), help="attention; default: vLLM's choice")
    parser.add_argument("--gpu-blocks", type=_positive, help="num_gpu_blocks_override; default: three longest prompts")
    parser.add_argument("--gpu-memory-utilization", type=float, help="default: vLLM's")
    parser.add_argument("--batched-tokens", type=_positive, default=8192, help="max_num_batched_tokens on a GPU")
    parser.add_argument("--host-gib", type=_seconds, help="host memory of a connector; default: three longest prompts")
    parser.add_argument("--decode-prompt", type=_positive, default=512 if cuda else 128)
    parser.add_argument("--decode-tokens", type=_positive, default=129 if cuda else 33)
    values = vars(parser.parse_args(arguments))
    if values["backend"] is not None and not cuda:
        parser.error("--backend chooses among a GPU's attention backends, and there is no CUDA device; leave it out")
    if values["decode_tokens"] < 2:
        parser.error("--decode-tokens must be 2 or more: times are taken between the first token and the last")
    out = values.pop("out")
    return Settings(**values), out.absolute()


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return value


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number > 0")
    return value


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _systems(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(SYSTEMS)}")
    return tuple(name for name in SYSTEMS if name in chosen)
