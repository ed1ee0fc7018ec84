"""What the demo found: whether hits were whole and answers agreed, and the table that says so."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.table import Table

from layerstream.hooks.vllm.local_engine import Answer
from layerstream.model_store import MODEL_NAME
from layerstream.timeline import Timeline
from layerstream.trials import MIN_SAMPLES, ratio_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything the demo measured. Of the same prompt, and in pairs in which either kind of hit came first."""

    hit_tokens: int
    """What a hit must cover: every whole block before the prompt's last token, which is always computed."""
    block_tokens: int
    dtype: str
    cold: Answer
    pairs: tuple[tuple[Answer, Answer], ...]
    """(LayerStream hit, vLLM's own prefix hit), one token each."""
    long: tuple[Answer, Answer, Answer]
    """(LayerStream hit, vLLM's own prefix hit, cold), several tokens with logprobs."""
    timelines: tuple[Timeline, ...]
    """Of the LayerStream hits in `pairs`."""

    def problems(self) -> list[str]:
        """What is not as promised; empty if all is well."""
        warm, local, cold = self.long
        found = []
        for name, expected, answers in (
            ("the cold run", 0, (self.cold, cold)),
            ("vLLM's own prefix hit", self.hit_tokens, (local, *(theirs for _, theirs in self.pairs))),
            ("the LayerStream hit", self.hit_tokens, (warm, *(ours for ours, _ in self.pairs))),
        ):
            covered = {answer.cached_tokens for answer in answers} - {expected}
            if covered:
                found.append(f"{name} covered {_listed(covered)} tokens instead of {expected:,}")
        loaded = {timeline.blocks * self.block_tokens for timeline in self.timelines} - {self.hit_tokens}
        if loaded:
            found.append(f"loads moved {_listed(loaded)} tokens instead of {self.hit_tokens:,}")
        if warm.token_ids != local.token_ids:
            found.append("a LayerStream hit and vLLM's own prefix hit gave different tokens")
        if warm.logprobs != local.logprobs:
            found.append("a LayerStream hit and vLLM's own prefix hit gave different logprobs")
        return found


def _listed(counts: Iterable[int]) -> str:
    return " and ".join(f"{count:,}" for count in sorted(counts))


def logprob_distance(one: Answer, other: Answer) -> float:
    """Largest difference of logprobs that both name, as far as both continue the same text."""
    distance = 0.0
    for index, (mine, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        distance = max([distance, *(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())])
        if one.token_ids[index] != other.token_ids[index]:
            break
    return distance


def table_of(findings: Findings) -> Table:
    """The findings as a table."""
    warm_s, local_s = (
        statistics.median(answer.seconds for answer in side) for side in zip(*findings.pairs, strict=True)
    )
    ratio = ratio_interval([(ours.seconds, theirs.seconds) for ours, theirs in findings.pairs])
    interval = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}, n = {ratio.samples}"
    if ratio.samples < MIN_SAMPLES:
        interval = f"n = {ratio.samples}; an interval takes {MIN_SAMPLES}"
    warm, local, cold = findings.long
    ours_is_theirs = "logprobs bit-equal" if warm.logprobs == local.logprobs else "[red]logprobs differ[/]"

    def median(value: Callable[[Timeline], float]) -> float:
        return statistics.median(map(value, findings.timelines)) if findings.timelines else float("nan")

    table = Table(
        title=f"{MODEL_NAME} in {findings.dtype}, the same prompt three ways", title_justify="left", show_header=False
    )
    for row in (
        ("cold: time to first token", f"{findings.cold.seconds * 1e3:,.0f} ms"),
        ("vLLM's own prefix hit, median", f"{local_s * 1e3:,.1f} ms"),
        ("through LayerStream, median", f"[bold]{warm_s * 1e3:,.1f} ms[/]"),
        ("LayerStream / vLLM's own hit", f"{ratio.median:.2f} ({interval})"),
        ("speed-up over cold", f"[bold]{findings.cold.seconds / warm_s:,.1f} x[/]"),
        ("hit tokens", _listed({ours.cached_tokens for ours, _ in findings.pairs})),
        ("bytes moved per hit", f"{median(lambda t: t.nbytes) / 1e6:,.1f} MB"),
        ("load rate", f"{median(lambda t: t.nbytes / t.load_seconds / 1e9):.2f} GB/s"),
        ("overlap ratio", f"{median(lambda t: t.overlap_ratio):.3f}"),
        ("exposed stall", f"{median(lambda t: t.stall_seconds) * 1e3:.2f} ms"),
        ("answer against vLLM's own hit", f"{_same(warm, local)}, {ours_is_theirs}"),
        ("answer against cold", f"{_same(warm, cold)}, logprobs within {logprob_distance(warm, cold):.2g}"),
        ("vLLM's own hit against cold", f"{_same(local, cold)}, logprobs within {logprob_distance(local, cold):.2g}"),
    ):
        table.add_row(*row)
    return table


def _same(one: Answer, other: Answer) -> str:
    return f"same {len(one.token_ids)} tokens" if one.token_ids == other.token_ids else "[red]tokens differ[/]"
