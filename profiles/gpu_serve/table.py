"""Observations of all systems of a model, turned into rows and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from layerstream.cli.results import Row, Target
from profiles.gpu_serve.observations import CASES, HALF, LAST, WHOLE, Case, Observation
from profiles.gpu_serve.plan import ANSWER_TOKENS, EXACT_PROMPTS, GRAPH_MODE, IN_GRAPH, LAYERSTREAM, OFFLOADING, PLAIN
from profiles.gpu_serve.runner import Ran

HIT = Target(relation="<=", value=1.03)
COLD = Target(relation="<=", value=1.03)
DECODE = Target(relation="<=", value=1.01)
PEER = Target(relation="<=", value=1.0)
OVERLAP = Target(relation=">=", value=0.95)
YES = Target(relation="=", value=1)

WORDS: dict[Case, str] = {WHOLE: "a hit", LAST: "a hit with one token left", HALF: "a hit of half the prompt"}
NOT_RUN = "not run: "
ENGINES = {PLAIN: "an engine without connector", OFFLOADING: "OffloadingConnector's", LAYERSTREAM: "LayerStream's"}
"""What two engines are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one model."""

    model: str
    lengths: Sequence[int]
    positions: int
    """Tokens that the model takes; lengths beyond are not run."""
    rounds: int
    decode_prompt: int
    found: Mapping[str, Ran]
    """Systems that ran, as far as they did, or why they did not."""
    cuda: bool
    in_graph: str | None

    def rows(self) -> list[Row]:
        """All rows, also those that could not be measured, which say why."""
        rows = [self._graphs(), self._decode()]
        for tokens in self.lengths:
            if tokens + ANSWER_TOKENS > self.positions:
                reason = f"{NOT_RUN}the model takes {self.positions} tokens with its answer"
                rows.append(Row(name=f"{self.model}, {tokens} tokens", failure=reason))
                continue
            rows.append(self._cold(tokens))
            for case in CASES:
                rows += [self._hit(LAYERSTREAM, case, tokens), self._overlap(case, tokens), self._peer(case, tokens)]
            rows += [self._exact(LAYERSTREAM, case, tokens) for case in (WHOLE, LAST)]
            if self.in_graph is not None:
                rows += [self._hit(IN_GRAPH, LAST, tokens), self._exact(IN_GRAPH, LAST, tokens)]
                rows.append(self._in_graph_gain(tokens))
            rows += [
                *self._times(tokens),
                *(self._control(LAYERSTREAM, other, tokens) for other in (PLAIN, OFFLOADING)),
            ]
        return rows

    def _name(self, system: str, tokens: int, what: str) -> str:
        by = f", waits in graphs ({self.in_graph})" if system == IN_GRAPH else ""
        return f"{self.model}{f', {tokens} tokens' if tokens else ''}{by}: {what}"

    def _select(self, system: str, kind: str, case: Case, tokens: int) -> dict[int, Observation]:
        ran = self.found.get(system, Ran())
        return {
            seen.round: seen for seen in ran.observations if (seen.kind, seen.case, seen.tokens) == (kind, case, tokens)
        }

    def _reason(self, systems: Sequence[str], part: str, case: Case, tokens: int) -> str:
        """Why a number of these systems is missing, or is made of fewer samples than planned; empty if it is whole."""
        for system in systems:
            ran = self.found.get(system)
            if ran is None:
                return f"{system} has not run"
            for seen in ran.observations:
                if seen.kind == "failed" and (seen.detail["part"], seen.case, seen.tokens) == (part, case, tokens):
                    return f"{system}: {seen.detail['reason']}"
            if ran.problem:
                return f"{system}: {ran.problem}"
        return ""

    def _judged(self, row: Row, systems: Sequence[str], part: str, case: Case, tokens: int) -> Row:
        """Say in the row why samples are missing."""
        reason = self._reason(systems, part, case, tokens)
        planned = {"exact": EXACT_PROMPTS, "engine": 1}.get(part, self.rounds)
        if not row.samples:
            row.failure = row.failure or NOT_RUN + (reason or "it was not observed")
        elif len(row.samples) < planned:
            count = f"{len(row.samples)} of {planned} samples{f', as {reason}' if reason else ''}"
            row.note = "; ".join(filter(None, (row.note, count)))
        return row

    def _pairs(
        self, name: str, target: Target | None, first: Mapping[int, Observation], second: Mapping[int, Observation]
    ) -> Row:
        pairs = [(first[number].value, second[number].value) for number in sorted(first.keys() & second.keys())]
        row = Row.of_pairs(name, pairs, target=target)
        if pairs:
            ours, theirs = (median(side) for side in zip(*pairs, strict=True))
            row.note = f"{ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms (medians)"
        return row

    def _graphs(self) -> Row:
        row = Row(name=self._name("", 0, f"{GRAPH_MODE} kept with the connector (1: yes)"), digits=0, target=YES)
        engine = self.found.get(LAYERSTREAM, Ran()).first("engine")
        if not self.cuda:
            row.failure = f"{NOT_RUN}a CPU engine has no CUDA graphs"
        elif engine is not None:
            row.samples = [float(engine.detail["graphs"] == GRAPH_MODE)]
            row.note = f"the worker's mode after start: {engine.detail['graphs']}"
        return self._judged(row, [LAYERSTREAM], "engine", "", 0)

    def _decode(self) -> Row:
        tokens = self.decode_prompt
        ours, plain = (self._select(system, "decode", "", tokens) for system in (LAYERSTREAM, PLAIN))
        row = self._pairs(self._name("", 0, "decode time per token, connector / none"), DECODE, ours, plain)
        if row.note:
            row.note += f"; after a new prompt of {tokens} tokens, blocks that fill are saved; "
            row.note += self._in_turn(LAYERSTREAM, PLAIN, self.lengths[0])
        return self._judged(row, [LAYERSTREAM, PLAIN], "decode", "", tokens)

    def _cold(self, tokens: int) -> Row:
        ours, plain = (self._select(system, "cold", "", tokens) for system in (LAYERSTREAM, PLAIN))
        row = self._pairs(self._name("", tokens, "cold TTFT, saving / no connector"), COLD, ours, plain)
        if row.note:
            row.note += f"; {self._in_turn(LAYERSTREAM, PLAIN, tokens)}"
        return self._judged(row, [LAYERSTREAM, PLAIN], "cold", "", tokens)

    def _hit(self, system: str, case: Case, tokens: int) -> Row:
        hit, own = (self._select(system, kind, case, tokens) for kind in ("hit", "own"))
        row = self._pairs(self._name(system, tokens, f"TTFT of {WORDS[case]} / of vLLM's own"), HIT, hit, own)
        if hit:
            row.note += f"; {hit[min(hit)].detail['cached_tokens']} tokens hit, in one engine, alternating"
        return self._judged(row, [system], "hit", case, tokens)

    def _overlap(self, case: Case, tokens: int) -> Row:
        """The target holds where the compute takes as long as the load."""
        row = Row(name=self._name(LAYERSTREAM, tokens, f"overlap ratio of {WORDS[case]}"))
        moved = self._select(LAYERSTREAM, "moved", case, tokens)
        gated = [seen.detail for seen in moved.values() if seen.detail["gated_load_seconds"] > 0]
        row.samples = [max(0.0, 1.0 - seen["stall_seconds"] / seen["gated_load_seconds"]) for seen in gated]
        if gated:
            load, stall, nbytes = (
                median(seen[name] for seen in gated) for name in ("load_seconds", "stall_seconds", "load_bytes")
            )
            row.note = (
                f"exposed stall {stall * 1e3:.2f} ms of a load of {load * 1e3:.2f} ms, {nbytes / 1e6:.1f} MB at "
                f"{nbytes / load / 1e9:.2f} GB/s (medians, from the connector's reports)"
            )
            compute = self._compute_seconds(case, tokens)
            if compute is None:
                row.note += "; no target, as it is unknown how long the compute takes"
            elif compute < load:
                row.note += f"; no target, as about {compute * 1e3:.2f} ms of compute are too short to hide it"
            else:
                row.target = OVERLAP
        elif moved:
            row.failure = f"{NOT_RUN}the step waited for its whole load, not layer by layer"
        return self._judged(row, [LAYERSTREAM], "hit", case, tokens)

    def _compute_seconds(self, case: Case, tokens: int) -> float | None:
        """About how long the device computes in a hit.

        A time to first token holds more than that: what it holds with one token left, less a step of decoding, which
        computes as much, is taken off.
        """
        own, last = (self._select(LAYERSTREAM, "own", each, tokens) for each in (case, LAST))
        step = self._select(LAYERSTREAM, "decode", "", self.decode_prompt)
        if not (own and last and step):
            return None
        of_own, of_last, of_step = (median(seen.value for seen in each.values()) for each in (own, last, step))
        return of_own - of_last + of_step

    def _peer(self, case: Case, tokens: int) -> Row:
        ours, theirs = (self._select(system, "hit", case, tokens) for system in (LAYERSTREAM, OFFLOADING))
        row = self._pairs(
            self._name("", tokens, f"TTFT of {WORDS[case]}, LayerStream / OffloadingConnector"), PEER, ours, theirs
        )
        if row.note:
            counts = [side[min(side)].detail["cached_tokens"] for side in (ours, theirs)]
            row.note += (
                f"; {counts[0]} against {counts[1]} tokens hit; {self._in_turn(LAYERSTREAM, OFFLOADING, tokens)}"
            )
        return self._judged(row, [LAYERSTREAM, OFFLOADING], "hit", case, tokens)

    def _exact(self, system: str, case: Case, tokens: int) -> Row:
        row = Row(
            name=self._name(system, tokens, f"logprobs of {WORDS[case]} bit-equal to vLLM's own (1: yes)"),
            digits=0,
            target=YES,
        )
        equal, told = (self._select(system, kind, case, tokens) for kind in ("exact", "sensitive"))
        if any(not seen.value for seen in told.values()):
            row.failure = f"{NOT_RUN}another prefix gives the same logprobs, so equal ones would prove nothing"
        else:
            row.samples = [equal[number].value for number in sorted(equal.keys() & told.keys())]
            row.note = "vLLM's own hit of the same length on computed KV; another prefix gives other logprobs"
        return self._judged(row, [system], "exact", case, tokens)

    def _in_graph_gain(self, tokens: int) -> Row:
        waits, whole = (self._select(system, "hit", LAST, tokens) for system in (IN_GRAPH, LAYERSTREAM))
        name = self._name(IN_GRAPH, tokens, f"TTFT of {WORDS[LAST]} / without such waits")
        row = self._pairs(name, PEER, waits, whole)
        if row.note:
            row.note += f"; {self._in_turn(IN_GRAPH, LAYERSTREAM, tokens)}"
        return self._judged(row, [IN_GRAPH, LAYERSTREAM], "hit", LAST, tokens)

    def _times(self, tokens: int) -> list[Row]:
        """Plain times, without a target."""
        shown: list[tuple[str, str, str, Case]] = [
            ("cold TTFT, no connector", PLAIN, "cold", ""),
            ("vLLM's own prefix hit", LAYERSTREAM, "own", WHOLE),
            ("LayerStream's hit", LAYERSTREAM, "hit", WHOLE),
            ("OffloadingConnector's hit", OFFLOADING, "hit", WHOLE),
        ]
        rows = []
        for what, system, kind, case in shown:
            row = Row(name=self._name("", tokens, what), unit="ms", scale=1e3, digits=2)
            row.samples = [seen.value for seen in self._select(system, kind, case, tokens).values()]
            rows.append(self._judged(row, [system], "cold" if kind == "cold" else "hit", case, tokens))
        return rows

    def _control(self, first: str, second: str, tokens: int) -> Row:
        """vLLM's own hit in one engine against another: what their ratios contain beside the connectors."""
        ours, theirs = (self._select(system, "own", WHOLE, tokens) for system in (first, second))
        what = f"control: vLLM's own hit in {ENGINES[first]} engine / in {ENGINES[second]}"
        row = self._pairs(self._name("", tokens, what), None, ours, theirs)
        return self._judged(row, [first, second], "hit", WHOLE, tokens)

    def _in_turn(self, first: str, second: str, tokens: int) -> str:
        """How two engines were compared, and how far apart they were in what both do alike."""
        own = (self._select(system, "own", WHOLE, tokens) for system in (first, second))
        alike = self._pairs("", None, *own).measured()
        return f"one engine after the other, a pair is one prompt on both; vLLM's own hits have the ratio {alike}"
