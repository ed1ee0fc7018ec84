"""`layerstream doctor --url`: what a running server's metrics say is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console

from layerstream.cli.doctor import Finding, Level, show
from layerstream.cli.plan import GIB
from layerstream.cli.scrape import Scrape, scrape
from layerstream.ghosts import SIZES
from layerstream.metric_table import METRICS
from layerstream.metrics import HOST

SLOWER = 1.1
"""A load counts as slower than recomputing from this ratio of their times on: measured times scatter."""
MANY_WHOLE = 0.5
"""Part of the loads that were waited for before the forward from which on that is said to be wrong."""
LITTLE_OVERLAP = 0.5
MANY_RETURNED = 0.1
"""Part of the evicted chunks that came back from which on the pool is said to be too small."""
MOST_OF_THEM = 0.8
"""A larger pool is advised that would still have had this part of them."""
MANY_DROPPED = 0.05
"""Part of the blocks, or objects, that were not written from which on that is said to be wrong."""


def run_on_server(url: str) -> int:
    """Print what the server's metrics say; 1 if the connector does not work there.

    Raises:
        ConfigError: the server does not answer, or not with metrics.
    """
    console = Console()
    with console.status(f"reading the metrics of {url}"):
        found = list(examine_server(url))
    return show(console, found, good="works on this server", bad="does not work on this server as it should")


def examine_server(url: str) -> Iterator[Finding]:
    """Read the metrics of the server at `url`, such as http://127.0.0.1:8000, and yield what they say.

    Raises:
        ConfigError: the server does not answer, or not with metrics.
    """
    yield from findings(scrape(url))


def findings(said: Scrape) -> Iterator[Finding]:
    """What the metrics say, in the order in which it is printed."""
    working = said.values(METRICS["working"].exported_name)
    if not working:
        yield check_presence(said)
        return
    yield check_working(working)
    yield check_hits(said)
    yield from check_loads(said)
    yield from check_gates(said)
    yield from check_pool(said)
    for tier in said.tiers():
        yield from check_tier(said, tier)
    yield from check_failures(said)


def check_presence(said: Scrape) -> Finding:
    """Without metrics of the connector, whether it is off, idle, or none of vLLM's."""
    if said.values(METRICS["queried_tokens"].exported_name):
        return Finding(
            what="LayerStream",
            value="loaded, and nothing counted so far: no request yet, or it is off for this engine",
            level=Level.WARN,
            fix="send a request; if this stays, the server's log says why (LayerStream is off for this engine ...)",
        )
    if any(sample.name.startswith("vllm:") for sample in said.samples):
        return Finding(
            what="LayerStream",
            value="this server runs without it",
            level=Level.BAD,
            fix='start it with --kv-transfer-config \'{"kv_connector": "LayerStreamConnector", "kv_role": "kv_both"}\'',
        )
    return Finding(
        what="LayerStream",
        value="no metric of vLLM is here",
        level=Level.BAD,
        fix="say the address of the vLLM server itself; --disable-log-stats takes its metrics away",
    )


def check_working(working: list[tuple[Mapping[str, str], float]]) -> Finding:
    """Whether some engine has given up."""
    off = [labels.get("engine", "0") for labels, value in working if not value]
    if off:
        return Finding(
            what="LayerStream",
            value=f"off on engine {', '.join(off)} of {len(working)} after a failure",
            level=Level.BAD,
            fix="restart it; the log line that says `LayerStream is off until the engine is restarted` has the cause",
        )
    return Finding(what="LayerStream", value=f"works on {len(working)} engine(s)")


def check_hits(said: Scrape) -> Finding:
    """What part of the prompts was loaded, and from where."""
    queried, hit = said.ours("queried_tokens"), said.ours("hit_tokens")
    value = f"{hit:,.0f} of {queried:,.0f} tokens"
    if hit:
        tiers = [HOST, *said.tiers()]
        parts = [(tier, said.ours("hit_tokens", tier=tier)) for tier in tiers]
        value += f" ({hit / queried:.0%}): " + ", ".join(f"{tier} {count:,.0f}" for tier, count in parts if count)
    return Finding(what="hits", value=value)


def check_loads(said: Scrape) -> Iterator[Finding]:
    """A loaded token against a computed one."""
    blocks, seconds = said.ours("transfer_blocks", direction="load"), said.ours("load_seconds", "_sum")
    computed = said.total("vllm:prompt_tokens_by_source_total", source="local_compute")
    engines = len(said.values(METRICS["block_tokens"].exported_name)) or 1
    tokens = blocks * said.ours("block_tokens") / engines
    if not tokens or not computed:
        return
    ranks = max(1, round(tokens / max(1.0, said.ours("hit_tokens"))))
    stalled = said.ours("load_stall_seconds", "_sum") / ranks
    prefill = max(0.0, said.total("vllm:request_prefill_time_seconds_sum") - stalled)
    load, compute = seconds / tokens, prefill / computed
    value = f"{load * 1e6:,.1f} us a token loaded, {compute * 1e6:,.1f} us a token computed"
    if load > SLOWER * compute:
        yield Finding(
            what="loads",
            value=f"{value}: loading is {load / compute:.1f} times slower" if compute else value,
            level=Level.WARN,
            fix="measure this machine's transfer paths (layerstream bench --calibrate) and see that the pool is pinned "
            "and near the GPU's NUMA node; a model this fast to compute may be better off without the connector",
        )
    else:
        yield Finding(what="loads", value=value)


def check_gates(said: Scrape) -> Iterator[Finding]:
    """How loads were waited for, and how much of them was hidden."""
    counts = {
        mode: said.ours("load_seconds", "_count", mode=mode) for mode in ("layerwise", "whole", "in_graph", "parked")
    }
    loads, whole = sum(counts.values()), counts["whole"]
    if not loads:
        return
    shown = ", ".join(f"{mode} {count:,.0f}" for mode, count in counts.items() if count)
    if whole >= MANY_WHOLE * loads:
        yield Finding(
            what="overlap",
            value=f"{whole / loads:.0%} of loads were waited for before the forward ({shown}): their steps replayed "
            "FULL CUDA graphs, in which no hook runs",
            level=Level.WARN,
            fix="set the connector's option `require_piecewise` to true, or try `in_graph_waits`; where most loads are "
            "a few tokens short of the whole prompt, this is as it must be",
        )
        return
    stalled = said.ours("load_stall_seconds", "_sum", mode="layerwise")
    seconds = said.ours("load_seconds", "_sum", mode="layerwise")
    overlap = max(0.0, 1 - stalled / seconds) if seconds else None
    if overlap is not None and overlap < LITTLE_OVERLAP:
        yield Finding(
            what="overlap",
            value=f"{overlap:.0%} of the time of layerwise loads was hidden, {stalled:,.2f} s were not ({shown})",
            level=Level.WARN,
            fix="loads take longer than the compute that hides them: where that holds up other requests, `load_mode` "
            '"auto" parks them once rates are known, and "parked" always',
        )
        return
    yield Finding(what="overlap", value=shown if overlap is None else f"{overlap:.0%} of load time hidden ({shown})")


def check_pool(said: Scrape) -> Iterator[Finding]:
    """Whether a larger pool would have kept what came back."""
    slots, size = said.ours("pool_slots"), said.ours("pool_bytes")
    used, evicted = said.ours("pool_used_slots"), said.ours("evicted_chunks")
    value = f"{used:,.0f} of {slots:,.0f} slots used, {size / GIB:,.2f} GiB, {evicted:,.0f} chunks evicted"
    by_size = {label: said.ours("returned_chunks", size=label) for label in SIZES}
    returned = sum(by_size.values())
    if evicted and returned >= MANY_RETURNED * evicted:
        label, kept = _enough(by_size)
        yield Finding(
            what="host pool",
            value=f"{value}; {returned:,.0f} of them came back",
            level=Level.WARN,
            fix=f"too small by {(SIZES[label] - 1) * size / GIB:,.2f} GiB: {label} times as large it would have had "
            f"{kept:.0%} of them; raise `host_gib`, or add a disk tier",
        )
    else:
        yield Finding(what="host pool", value=value)
    dropped, saved = said.ours("dropped_save_blocks"), said.ours("saved_blocks")
    if dropped and dropped >= MANY_DROPPED * (dropped + saved):
        yield Finding(
            what="saves",
            value=f"{dropped:,.0f} of {dropped + saved:,.0f} blocks were not saved: no room could be evicted",
            level=Level.WARN,
            fix="raise `host_gib`, so that the pool holds more than what requests read and write at a time; with "
            "`tenant_share` set, a tenant's share may be too small",
        )


def _enough(by_size: Mapping[str, float]) -> tuple[str, float]:
    """The smallest pool that would have had most of what came back, and the part that it would have had."""
    returned, labels = sum(by_size.values()), list(by_size)
    parts = [sum(list(by_size.values())[: place + 1]) / returned for place in range(len(labels))]
    return next((label, part) for label, part in zip(labels, parts, strict=True) if part >= MOST_OF_THEM)


def check_tier(said: Scrape, tier: str) -> Iterator[Finding]:
    """Whether a tier is up, and gets what it should."""
    healthy = said.values(METRICS["tier_healthy"].exported_name, tier=tier)
    down = [labels.get("engine", "0") for labels, value in healthy if not value]
    moved = {way: said.ours("tier_bytes", tier=tier, direction=way) / GIB for way in ("read", "write")}
    value = f"read {moved['read']:,.2f} GiB, wrote {moved['write']:,.2f} GiB"
    capacity, used = said.ours("tier_capacity_bytes", tier=tier), said.ours("tier_used_bytes", tier=tier)
    if capacity:
        value += f", {used / capacity:.0%} full"
    if down:
        failed = {kind: said.ours("failures", tier=tier, kind=kind) for kind in ("read", "write", "missing", "late")}
        shown = ", ".join(f"{kind} {count:,.0f}" for kind, count in failed.items() if count)
        yield Finding(
            what=f"tier {tier}",
            value=f"down on engine {', '.join(down)}; failures: {shown or 'none of ranks'}",
            level=Level.BAD,
            fix="see that its service or disk is there and answers; it is used again once it does, and the server's "
            "log has the cause",
        )
    else:
        yield Finding(what=f"tier {tier}", value=value)
    dropped, written = (
        said.ours("tier_dropped_objects", tier=tier),
        said.ours("tier_objects", tier=tier, direction="write"),
    )
    if dropped and dropped >= MANY_DROPPED * (dropped + written):
        yield Finding(
            what=f"tier {tier}",
            value=f"{dropped:,.0f} of {dropped + written:,.0f} objects were not written",
            level=Level.WARN,
            fix='it is slower than what is saved, or full: give it more room, or set its `admission` to "reused"',
        )


def check_failures(said: Scrape) -> Iterator[Finding]:
    """What went wrong so far."""
    series = said.values(METRICS["failures"].exported_name)
    counts = {
        (labels["tier"], labels["kind"]): said.ours("failures", tier=labels["tier"], kind=labels["kind"])
        for labels, _ in series
    }
    shown = ", ".join(f"{tier} {kind} {count:,.0f}" for (tier, kind), count in counts.items() if count)
    fallen = said.ours("fallen_requests")
    if fallen:
        shown += f"{', ' if shown else ''}{fallen:,.0f} requests got less than a tier may have had"
    if shown:
        yield Finding(
            what="failures",
            value=shown,
            level=Level.WARN,
            fix="each cost a recompute at most, but for loads that failed; the server's log has each with its cause",
        )
    else:
        yield Finding(what="failures", value="none")
