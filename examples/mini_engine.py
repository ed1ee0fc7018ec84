"""LayerStream without vLLM: a small engine in plain torch that streams KV cache layer by layer.

    python examples/mini_engine.py --prompt-tokens 512 --tail-tokens 16

A prompt is served three times: cold, saving its KV to host memory; as a local hit, its KV still in place; and warm, its
KV gone from the cache and streamed back while the rest of the prompt computes. The last two must give the same logits,
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Beside this file, from wherever it is run or imported.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from mini_batch import PER_TOKEN, Request, batch_inputs, table_width
from mini_llama import LlamaShape, MiniLlama

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.graphs.capture import graph_api_for
from layerstream.graphs.piecewise import PiecewiseModule
from layerstream.hooks.layer_gate import LayerGate
from layerstream.hooks.torch_module import attach
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.metrics import TransferStats

WIPED = 3.0
"""What a wiped cache holds: wrong, and finite, as a masked NaN would spread."""
REPORT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving came to."""

    logits: torch.Tensor
    """`float32[vocab]` on the CPU: of the prompt's last token, or of the last one decoded."""
    seconds: float
    """To the first token; of a decode, all of it."""
    step_seconds: list[float]
    """Host time of each step; the last one's includes waiting for the device."""
    hit_tokens: int
    """Tokens that were not computed."""
    stats: TransferStats = field(default_factory=TransferStats)
    """What moved, all of it ended; for a warm serving the load alone."""


class _CapturedWaits:
    """Hooks of a forward that is captured whole: they run in the capture alone, to add waits where those are on."""

    def __init__(self, gate: LayerGate) -> None:
        self.names = gate.names
        self._gate = gate

    def before(self, name: str) -> None:
        """Add the layer's wait to the graph."""
        self._gate.capture(name)

    def after(self, name: str) -> None:
        """Nothing: layers that no hook saved are saved when the step ends."""


class MiniEngine:
    """Serves prompts with `model` over a paged KV cache that LayerStream saves and restores. Close it."""

    def __init__(
        self,
        model: MiniLlama,
        *,
        num_blocks: int = 256,
        block_tokens: int = 16,
        step_tokens: int = 512,
        batch: int = 8,
        graphs: bool = False,
        whole: bool = False,
        options: dict[str, object] | None = None,
    ) -> None:
        """
        Args:
            model: its parameters' device is the engine's.
            num_blocks: of the KV cache; block 0 is kept for padding.
            block_tokens: tokens in a block.
            step_tokens: most tokens a step runs.
            batch: most sequences a decode step runs.
            graphs: capture CUDA graphs, in pieces around the layers' hooks; on a CPU the same code runs without them.
            whole: capture one graph instead, which waits for whole loads unless LayerStream's `in_graph_waits` is on.
            options: LayerStream's (`layerstream.config.StreamConfig`).
        """
        self.model, self.block_tokens, self.step_tokens = model, block_tokens, step_tokens
        weight, shape = model.lm_head.weight, model.shape
        self.device = weight.device
        self.caches = torch.zeros(
            (shape.layers, num_blocks, 2, block_tokens, shape.kv_heads, shape.head_dim),
            dtype=weight.dtype,
            device=self.device,
        )
        model.bind(self.caches)
        self.streamer: StreamEngine = build_engine(
            {f"layers.{i}": cache for i, cache in enumerate(self.caches)},
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            config=StreamConfig.from_extra({"host_gib": 1.0, **(options or {})}),
        )
        names = [f"layers.{i}" for i in range(shape.layers)]
        self.gate = LayerGate(self.streamer, names)
        api = graph_api_for(self.device) if graphs else None
        self._whole = whole and api is not None
        self.hooks = attach(
            model,
            _CapturedWaits(self.gate) if self._whole else self.gate,
            {f"{name}.attention": name for name in names},
        )
        sizes = [1 << power for power in range(step_tokens.bit_length()) if 1 << power < step_tokens]
        self.module = PiecewiseModule(
            model,
            buckets=[*sizes, step_tokens, batch],
            pad=dict.fromkeys(PER_TOKEN, 0),
            fixed=lambda: {"the KV cache": self.caches},
            graph_api=api,
            whole=self._whole,
        )
        self._graphs = api is not None
        self._free = list(range(num_blocks - 1, 0, -1))
        self._pool_pages = 0
        self._steps = self._jobs = 0
        self._pending: set[int] = set()
        self._stats = TransferStats()
        self.requests: list[Request] = []

    def serve_cold(self, tokens: Sequence[int], *, save: bool = True) -> Served:
        """Compute all of `tokens`; with `save`, full blocks go to the host pool as they fill. Keeps the request."""
        needed = -(-len(tokens) // self.block_tokens)
        request = Request(list(tokens), self._take(needed), self._pool_pages)
        pool = self.streamer.pool
        ready = pool.ready_slots * pool.pages // pool.slots
        if save and self._pool_pages + needed > ready:
            raise RuntimeError(
                f"the host pool has {ready} pages ready of {pool.pages}; raise host_gib, forget() prompts, or wait for "
                "the rest"
            )
        self._pool_pages += needed if save else 0
        self.requests.append(request)
        return self._serve(request, hit_tokens=0, save=save)

    def serve_local_hit(self, tokens: Sequence[int], *, tail_tokens: int = 1) -> Served:
        """Compute the last `tail_tokens` or a little more of a prompt that was served cold, its other KV in place."""
        request = self._known(tokens)
        return self._serve(request, hit_tokens=self._hit(request, tail_tokens))

    def serve_warm(self, tokens: Sequence[int], *, tail_tokens: int = 1) -> Served:
        """As `serve_local_hit`, but the KV cache is wiped first, and the hit streamed back from the host pool."""
        request = self._known(tokens)
        hit = self._hit(request, tail_tokens)
        if hit > request.saved_blocks * self.block_tokens:
            raise RuntimeError("the prompt was not saved when it was served cold")
        self.wipe(request)
        return self._serve(request, hit_tokens=hit, load=True)

    def decode(self, count: int, *, save: bool = False) -> Served:
        """Run `count` decode steps, each over every request kept; the most likely token is taken."""
        self.drain()
        for request in self.requests:
            self._grow(request, len(request.tokens) + count)
        if self._graphs:
            for ahead in range(1, count + 1):
                self._capture([(request, ahead) for request in self.requests], tokens=len(self.requests))
        begun, marks = self._begin(), []
        for _ in range(count):
            for request in self.requests:
                request.tokens.append(request.next_token)
            logits = self.step([(request, 1) for request in self.requests], save=save)
            for request, token in zip(self.requests, logits.argmax(dim=-1).tolist(), strict=True):
                request.next_token = token
            marks.append(time.perf_counter())
        return self._served(self.requests[-1], logits, begun, marks, hit_tokens=0)

    def step(
        self, batch: Sequence[tuple[Request, int]], *, load: Job | None = None, save: bool = False
    ) -> torch.Tensor:
        """Run the next tokens of some requests: one forward, with the streamer's calls around it.

        Args:
            batch: requests, and how many of their tokens.
            load: what the forward must wait for, layer by layer.
            save: save blocks that the step fills.

        Returns:
            `[len(batch), vocab]`: logits after each request's last token of the step.
        """
        inputs, last = batch_inputs(batch, self.block_tokens)
        tensors, rows = {name: self._upload(each) for name, each in inputs.items()}, self._upload(last)
        jobs = [] if load is None else [load]
        for request, count in batch:
            request.computed += count
            full = request.computed // self.block_tokens
            if save and full > request.saved_blocks:
                jobs.append(self._job(JobKind.SAVE, request, request.saved_blocks, full))
                request.saved_blocks = full
        self._steps += 1
        plan = StepPlan(step=self._steps, jobs=tuple(jobs)) if jobs else None
        self.streamer.begin_step(plan)
        if load is not None:
            self.streamer.start_loads(layerwise=not self._whole, in_graph=self._whole)
        hidden = self.module(**tensors)
        self.streamer.end_step()
        logits: torch.Tensor = self.model.logits(hidden[rows])
        return logits

    def drain(self) -> TransferStats:
        """Wait until everything queued has been reported; what has moved since the last call."""
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while self._pending:
            report = self.streamer.poll()
            if report is not None:
                if report.failed:
                    raise RuntimeError(f"jobs {sorted(report.failed)} failed; the log says why")
                self._pending -= set(report.done)
                self._stats = self._stats.merge(report.stats)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"jobs {sorted(self._pending)} were not reported in {REPORT_TIMEOUT_S:g} s")
            else:
                time.sleep(1e-4)
        stats, self._stats = self._stats, TransferStats()
        return stats

    def wipe(self, request: Request) -> None:
        """Overwrite all KV of a request on the device."""
        self.caches[:, torch.tensor(request.blocks, device=self.device)] = WIPED

    def forget(self) -> None:
        """Drop every request, its blocks and its pages."""
        for request in self.requests:
            self._free += request.blocks
        self.requests.clear()
        self._pool_pages = 0

    def close(self) -> None:
        """Finish and free."""
        self.hooks.remove()
        self.streamer.close(REPORT_TIMEOUT_S)

    def _serve(self, request: Request, *, hit_tokens: int, load: bool = False, save: bool = False) -> Served:
        self.drain()
        request.computed = hit_tokens
        ends = [*range(hit_tokens + self.step_tokens, len(request.tokens), self.step_tokens), len(request.tokens)]
        if self._graphs:
            for start, end in pairwise([hit_tokens, *ends]):
                self._capture([(request, end - hit_tokens)], tokens=end - start)
        job = self._job(JobKind.LOAD, request, 0, hit_tokens // self.block_tokens) if load else None
        begun, marks = self._begin(), []
        for end in ends:
            logits = self.step([(request, end - request.computed)], load=job, save=save)
            job = None
            marks.append(time.perf_counter())
        return self._served(request, logits, begun, marks, hit_tokens=hit_tokens)

    def _begin(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _served(
        self, request: Request, logits: torch.Tensor, begun: float, marks: list[float], *, hit_tokens: int
    ) -> Served:
        request.next_token = int(logits[-1].argmax())
        marks[-1] = time.perf_counter()
        return Served(
            logits=logits[-1].float().cpu(),
            seconds=marks[-1] - begun,
            step_seconds=[end - start for start, end in pairwise([begun, *marks])],
            hit_tokens=hit_tokens,
            stats=self.drain(),
        )

    def _capture(self, batch: Sequence[tuple[Request, int]], *, tokens: int) -> None:
        """Capture, unless it is there, a step of `tokens` tokens that ends where `batch` does."""
        inputs = {name: self._upload(np.zeros(tokens)) for name in PER_TOKEN}
        inputs["tables"] = self._upload(np.zeros((len(batch), table_width(batch, self.block_tokens))))
        if not self.module.is_captured(**inputs):
            self.module.capture(**inputs)

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self.device)

    def _job(self, kind: JobKind, request: Request, first: int, end: int) -> Job:
        self._jobs += 1
        self._pending.add(self._jobs)
        return Job(
            job_id=self._jobs,
            kind=kind,
            request_id=f"request {self.requests.index(request)}",
            block_ids=tuple(request.blocks[first:end]),
            pool_runs=((request.pool_page + first, end - first),),
        )

    def _known(self, tokens: Sequence[int]) -> Request:
        for request in self.requests:
            if request.tokens[: len(tokens)] == list(tokens):
                # Drops what was decoded since.
                request.tokens = list(tokens)
                return request
        raise RuntimeError("the prompt was not served cold before")

    def _hit(self, request: Request, tail_tokens: int) -> int:
        hit = (len(request.tokens) - max(1, tail_tokens)) // self.block_tokens * self.block_tokens
        if hit < 1:
            raise RuntimeError(f"a tail of {tail_tokens} leaves no full block of {len(request.tokens)} tokens to hit")
        return hit

    def _grow(self, request: Request, tokens: int) -> None:
        request.blocks += self._take(max(0, -(-tokens // self.block_tokens) - len(request.blocks)))

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks are needed and {len(self._free)} free; raise num_blocks or forget()")
        return [self._free.pop() for _ in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    engine = _engine(chosen)
    generator = np.random.default_rng(chosen.seed)
    prompts = [generator.integers(0, engine.model.shape.vocab, chosen.prompt_tokens).tolist() for _ in range(2)]
    # The first prompt is for what runs once only: kernels are compiled, graphs captured, hooks seen.
    for prompt in prompts:
        cold = engine.serve_cold(prompt)
        pairs = [
            (
                engine.serve_local_hit(prompt, tail_tokens=chosen.tail_tokens),
                engine.serve_warm(prompt, tail_tokens=chosen.tail_tokens),
            )
            for _ in range(chosen.repeats)
        ]
    decode = engine.decode(chosen.decode) if chosen.decode else None
    engine.close()
    local, warm = ([pair[side] for pair in pairs] for side in (0, 1))
    moved = warm[0].stats
    for served in warm[1:]:
        moved = moved.merge(served.stats)
    result = {
        "device": str(engine.device),
        "prompt_tokens": len(prompt),
        "hit_tokens": warm[0].hit_tokens,
        "cold_ttft_s": cold.seconds,
        "local_hit_ttft_s": statistics.median(served.seconds for served in local),
        "warm_ttft_s": statistics.median(served.seconds for served in warm),
        "loaded_bytes": moved.load_bytes // len(warm),
        "load_s": moved.load_seconds / len(warm),
        "overlap_ratio": moved.overlap_ratio,
        "bit_equal": all(torch.equal(a.logits, b.logits) for a, b in pairs),
    }
    if decode is not None:
        result["decode_s_per_step"] = statistics.median(decode.step_seconds)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name:<18} {value:.6g}" if isinstance(value, float) else f"{name:<18} {value}")
    if not result["bit_equal"]:
        print("the warm logits differ from the local hit's", file=sys.stderr)
    return 0 if result["bit_equal"] else 1


def _engine(chosen: argparse.Namespace) -> MiniEngine:
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device(chosen.device)
    # bfloat16 is slow on most CPUs.
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if chosen.model is not None:
        model = MiniLlama.load(chosen.model, device=device, dtype=dtype)
    else:
        shape = LlamaShape(**{name: getattr(chosen, name) for name in _SIZES})
        model = MiniLlama.random(shape, seed=chosen.seed, device=device, dtype=dtype)
    blocks = 2 * -(-chosen.prompt_tokens // chosen.block_tokens) + -(-chosen.decode // chosen.block_tokens) * 2 + 4
    return MiniEngine(
        model,
        num_blocks=blocks,
        block_tokens=chosen.block_tokens,
        step_tokens=chosen.step_tokens,
        graphs=chosen.graphs,
        whole=chosen.whole_graph,
        options={"host_gib": chosen.host_gib, **json.loads(chosen.options)},
    )


_SIZES = tuple(part.name for part in fields(LlamaShape) if part.type == "int")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--model", type=Path, help="folder of a Llama's config.json and model.safetensors")
    for part in fields(LlamaShape):
        if part.name in _SIZES:
            parser.add_argument(f"--{part.name.replace('_', '-')}", type=int, default=part.default)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tail-tokens", type=int, default=16, help="least tokens that a hit leaves to compute")
    parser.add_argument("--step-tokens", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--decode", type=int, default=0, help="decode steps at the end")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of a local hit and a warm serving")
    parser.add_argument("--host-gib", type=float, default=1.0)
    parser.add_argument("--options", default="{}", help="further LayerStream options, as JSON")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs; GPUs only")
    parser.add_argument("--whole-graph", action="store_true", help="one graph of everything instead of pieces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
