"""The connector's scheduler half: vLLM's scheduling calls, turned into questions to the coordinator."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from layerstream.chooser import RateChooser
from layerstream.coordinator import Coordinator
from layerstream.decisions import FixedMode, LoadMode
from layerstream.errors import ConfigError, GeometryError
from layerstream.exporter import Exporter
from layerstream.hooks.vllm.block_hashes import BlockHashes, FinerHashes
from layerstream.hooks.vllm.compat import cache_groups, unsupported
from layerstream.hooks.vllm.events import KVEvents
from layerstream.hooks.vllm.identify import model_folders, namespace_of
from layerstream.hooks.vllm.messages import Handshake, StepMetadata, WorkerReport
from layerstream.identity import PORTABLE_HASH_TOKENS
from layerstream.jobs import ModelAccess, StepPlan
from layerstream.measured import StepWork, attended
from layerstream.metrics import HOST, TierTraffic, TransferStats, interval_line, tiers_line
from layerstream.model_store import cache_dir
from layerstream.rate_store import RateStore
from layerstream.rates import Rates
from layerstream.tiers.base import IndexSite
from layerstream.tiers.client import TierClient
from layerstream.tiers.portable_site import portable_site
from layerstream.tiers.registry import TierSpec, parse_tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from layerstream.config import StreamConfig
    from layerstream.decisions import Chooser, Decision
    from layerstream.exporter import Sample
    from layerstream.identity import Namespace
    from layerstream.jobs import RankInfo
    from layerstream.tiering import Tiering

logger = init_logger("vllm.layerstream")

LONGEST_STEP_S = 1.0
"""What one step may add to the age of a job."""
STEPS_APART = 3
"""Steps of one kind in a row from which on the time between two is that of such a step."""
SOURCES = {HOST: CacheHitSource.HOST, "DISK": CacheHitSource.DISK}
"""Medium of a tier -> vLLM's word for it; what is elsewhere has none of its own."""
CLOSE_TIERS_S = 1.0
"""Seconds that a tier gets to let go of its end here."""


class BlockPoolHolds:
    """Keeps blocks of vLLM's pool from being handed on, by reference counts."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block."""
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block] for block in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop the reference; the tail goes first, as vLLM frees blocks."""
        assert self.pool is not None
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(block_ids)])


class SchedulerHalf:
    """The end of the connector that owns keys, slots, pins and publication for all ranks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StreamConfig) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._config = config
        self._holds = BlockPoolHolds()
        self._requests: dict[str, Request] = {}
        self._asked: dict[str, int] = {}
        self._hashes = BlockHashes()
        self._moved = TransferStats()
        self._tier_traffic: dict[int, TierTraffic] = {}
        self._logged_at = time.monotonic()
        self._failed: set[str] = set()
        """Parked requests whose load has failed, and whom no rank was told of yet."""
        self._off: str | None = None
        """Why nothing is loaded or saved any more; None while all is well."""
        self._seconds, self._stepped_at = 0.0, time.monotonic()
        self._pool_grows = False
        """Whether some rank's pool is not ready as a whole."""
        self._coordinator: Coordinator | None = None
        self._rates = Rates(
            stages=vllm_config.parallel_config.pipeline_parallel_size,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        )
        self._rate_store: RateStore | None = None
        self._computes_hit = False
        """Whether the step being planned computes what could have been loaded."""
        self._decode_steps = 0
        """Steps in a row that only decoded."""
        self._exporter: Exporter | None = None
        self._events: KVEvents | None = None
        """None unless vLLM publishes events."""
        self._tiers = parse_tiers(config.tiers)
        self._portable = any(spec.portable for spec in self._tiers)
        reason = unsupported(vllm_config, kv_cache_config)
        if reason is not None:
            logger.warning("LayerStream is off for this engine, which runs as without it: %s", reason)
            return
        self._world_size = vllm_config.parallel_config.world_size
        self._groups = cache_groups(kv_cache_config)
        block_tokens = self._block_tokens = self._groups.block_tokens
        self._chunk_blocks = config.chunk_blocks(block_tokens)
        self._hash_tokens = math.gcd(PORTABLE_HASH_TOKENS, block_tokens) if self._portable else block_tokens
        if self._hash_tokens < block_tokens:
            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            self._hashes = BlockHashes(
                FinerHashes(tokens=self._hash_tokens, block_tokens=block_tokens, algorithm=algorithm)
            )
        self._coordinator = Coordinator(
            chunk_blocks=self._chunk_blocks,
            block_tokens=block_tokens,
            world_size=self._world_size,
            chooser=self._chooser(),
            decided=self._decided,
            save_decode=config.save_decode,
            holds=self._holds,
            clock=lambda: self._seconds,
            tenant_share=config.tenant_share,
            eviction=config.eviction,
        )
        self._exporter = Exporter(self._coordinator, lambda: self._off is None)
        events = vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            media = {spec.name: spec.tier.medium for spec in self._tiers}
            self._events = KVEvents(kv_cache_config, self._groups.ids, block_tokens=block_tokens, media=media)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._saves, self._loads = transfer.is_kv_producer, transfer.is_kv_consumer

    def _chooser(self) -> Chooser:
        if self._config.load_mode != "auto":
            return FixedMode(LoadMode(self._config.load_mode))
        return RateChooser(
            self._rates,
            recompute=self._config.recompute == "auto",
            # The step after the one that a report belongs to is planned already.
            lag_steps=2 if self._vllm_config.scheduler_config.async_scheduling else 1,
        )

    def _decided(self, decision: Decision) -> None:
        self._rates.decided(decision)
        self._computes_hit |= decision.reason == "recompute"

    def bind_block_pool(self, pool: BlockPool) -> None:
        """vLLM's block pool, for holds."""
        self._holds.pool = pool

    def set_ranks(self, handshakes: Mapping[tuple[int, int], object]) -> None:
        """What the ranks said about their pools; the smallest decides, now and while they grow.

        Raises:
            GeometryError: ranks are missing, or disagree on how many blocks a chunk holds.
            PoolError: a pool holds no chunk, or ranks whose pools grow share a number.
        """
        ranks = [shake.info for shake in handshakes.values() if isinstance(shake, Handshake)]
        if self._coordinator is None:
            return
        if not ranks:
            logger.warning(
                "LayerStream is off for this engine: its workers' reports did not arrive; in MultiConnector, list "
                "LayerStreamConnector first"
            )
            return
        if len(ranks) != self._world_size:
            raise GeometryError(
                f"{len(ranks)} of {self._world_size} ranks have set up a host pool; all must, or no block is complete"
            )
        if any(rank.chunk_blocks != self._chunk_blocks for rank in ranks):
            raise GeometryError(
                f"ranks chose chunks of {sorted({rank.chunk_blocks for rank in ranks})} blocks; the same options "
                "must reach every rank"
            )
        slots = min(rank.pool_slots for rank in ranks)
        # What a step saves beyond its own blocks should fit the ring, or the step waits for copies to the host.
        ring_bytes = (self._config.staging_mib << 20) // 2
        backlog_blocks = max(1, ring_bytes // max(rank.block_bytes for rank in ranks))
        growing = any(rank.ready_slots is not None and rank.ready_slots < rank.pool_slots for rank in ranks)
        ready = {rank.rank: rank.pool_slots if rank.ready_slots is None else rank.ready_slots for rank in ranks}
        largest = max(ranks, key=lambda rank: rank.block_bytes)
        self._coordinator.set_slots(
            slots,
            ready=ready if growing else None,
            backlog_blocks=backlog_blocks,
            layers=max(rank.layers for rank in ranks),
            block_bytes=max(rank.block_bytes for rank in ranks),
            groups=tuple(zip(largest.group_bytes, self._groups.window_blocks, strict=False)),
        )
        self._pool_grows = self._coordinator.pool_slots < slots
        if self._exporter is not None:
            self._exporter.block_tokens = self._block_tokens
            self._exporter.pool_slot_bytes = self._chunk_blocks * sum(rank.block_bytes for rank in ranks if rank.keeps)
        if self._events is not None:
            self._coordinator.listen(self._events)
        namespace = namespace_of(self._vllm_config, self._kv_cache_config, ranks, user=self._config.namespace, epoch=0)
        if self._portable:
            namespace = dataclasses.replace(namespace, hash_block_tokens=self._hash_tokens)
        if self._rate_store is None:
            self._open_rates(ranks, namespace)
        name = namespace.digest()
        if self._tiers and self._coordinator.tiering is None:
            name = self._open_tiers(ranks, namespace, self._coordinator) or name
        self._log_start(ranks, name, self._coordinator)

    def _open_rates(self, ranks: Sequence[RankInfo], namespace: Namespace) -> None:
        """Begin with what a calibration and earlier runs found; of the ranks, the one that has most decides."""
        self._rates.calibrated(max(ranks, key=lambda rank: rank.block_bytes).calibrated)
        self._rate_store = RateStore(
            self._rates,
            cache_dir(),
            machine=f"{len(ranks)} x {ranks[0].machine}",
            model=namespace.digest(),
            clock=time.monotonic,
        )

    def _open_tiers(self, ranks: Sequence[RankInfo], namespace: Namespace, coordinator: Coordinator) -> bytes | None:
        """Let the coordinator use the tiers, unless what they would keep could not be told apart later.

        Returns:
            The namespace of objects; None if the tiers stay off.

        Raises:
            ConfigError: a tier cannot work on this engine.
        """
        persistable, reason = namespace.persistable
        if not persistable:
            logger.warning("LayerStream: the tiers are off for this engine: %s", reason)
            return None
        site = self._site(ranks, namespace)
        if site is None:
            return None
        clients: list[TierClient] = []
        try:
            for spec in self._tiers:
                self._keep_apart(spec)
                index = spec.tier.open_index(site)
                deadline_s, watch = spec.lookup_ms / 1000, self._events is not None
                clients.append(TierClient(spec, index, place=len(clients), lookup_deadline_s=deadline_s, watch=watch))
        except ConfigError as error:
            for client in clients:
                client.close(CLOSE_TIERS_S)
            # vLLM prints the traceback of a process that fails to start; the line a user needs must stand alone.
            logger.error("%s", error)
            raise
        coordinator.use_tiers(
            clients,
            namespace=site.namespace,
            block_bytes=max(rank.block_bytes for rank in ranks),
            block_hashes=self._block_tokens // self._hash_tokens if self._portable else 1,
            writes=self._saves,
            rates=self._rates,
            bring_all=self._config.recompute == "never" or self._config.load_mode != "auto",
        )
        if self._events is not None and coordinator.tiering is not None:
            coordinator.tiering.listen(self._events)
        return site.namespace

    def _keep_apart(self, spec: TierSpec) -> None:
        """Refuse a tier that lies among the model's files.

        Raises:
            ConfigError: it does.
        """
        kept = spec.tier.folder
        if kept is None:
            return
        for folder in model_folders(self._vllm_config):
            if kept.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"LayerStream: tier {spec.name} at {kept} lies in the model's folder {folder}: its files would be "
                    "taken for weights, and what it holds never found again; use a folder outside of it"
                )

    def _site(self, ranks: Sequence[RankInfo], namespace: Namespace) -> IndexSite | None:
        """What tiers are told of this engine; None if its objects cannot be told apart.

        Raises:
            GeometryError: ranks do not hold all that portable objects are made of.
        """
        if self._portable:
            return portable_site(ranks, namespace, chunk_blocks=self._chunk_blocks)
        ordered = sorted((rank for rank in ranks if rank.keeps), key=lambda rank: rank.object_rank)
        if [rank.object_rank for rank in ordered] != list(range(len(ordered))):
            logger.warning(
                "LayerStream: the tiers are off for this engine: some ranks with the same KV share a pool and others "
                "do not, so their objects have no numbers"
            )
            return None
        return IndexSite(
            namespace=namespace.digest(),
            chunk_blocks=self._chunk_blocks,
            block_bytes=tuple(rank.block_bytes for rank in ordered),
            header_bytes=tuple(rank.header_bytes for rank in ordered),
        )

    def _log_start(self, ranks: Sequence[RankInfo], namespace: bytes, coordinator: Coordinator) -> None:
        first, slots = ranks[0], coordinator.planned_slots
        ready = f"; {coordinator.pool_slots} ready, the rest follows in the background" if self._pool_grows else ""
        chunk_bytes = first.block_bytes * first.chunk_blocks
        pools = sum(rank.keeps for rank in ranks)
        portable = " (portable)" if self._portable else ""
        logger.info(
            "LayerStream is on: %d rank(s) on %s, %d layers, page %.1f KiB a layer, chunk %d tokens (%.2f MiB), "
            "pool %d slots %s (%.2f GiB, %s%s), tiers %s, loads %s, decode blocks %s%s, namespace %s",
            len(ranks),
            first.device,
            first.layers,
            first.block_bytes / first.layers / 1024,
            self._chunk_blocks * self._block_tokens,
            chunk_bytes / (1 << 20),
            slots,
            "a rank" if pools == len(ranks) else f"for every {len(ranks) // pools} ranks, whose KV is the same",
            slots * chunk_bytes / (1 << 30),
            "pinned" if all(rank.pinned for rank in ranks) else "not pinned",
            ready,
            "none" if coordinator.tiering is None else ", ".join(f"{spec.tier}{portable}" for spec in self._tiers),
            self._config.load_mode,
            "saved" if self._config.save_decode else "not saved",
            ", every block verified" if self._config.verify else "",
            namespace.hex()[:12],
        )

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens after the local hit that can be loaded, and whether the request is parked for it; None while tiers may
        bring more. Changes nothing but that, and the note of what was asked, which vLLM's next call leaves out."""
        if self._coordinator is None:
            return 0, False
        self._asked[request.request_id] = local_tokens
        if self._off is not None or self._coordinator.overdue or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        hashes = self._hashes.of(request)
        if self._events is not None:
            self._events.seen(request, hashes)
        decision = self._coordinator.match(
            request.request_id, hashes, request.num_tokens, local_tokens, tenant=request.cache_salt
        )
        if decision is None:
            return None, False
        return decision.tokens, bool(decision.tokens) and decision.mode is LoadMode.PARKED

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks were allocated: the promise of `matched_tokens` is taken up for `external_tokens` tokens.

        Raises:
            TransferError: a promised block is gone.
        """
        if self._coordinator is None:
            return
        self._requests[request.request_id] = request
        self._coordinator.admit(
            request.request_id,
            self._hashes.of(request),
            self._tables(blocks.get_block_ids()),
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            local_tokens=self._asked.pop(request.request_id, 0),
            external_tokens=external_tokens,
            tenant=request.cache_salt,
        )

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Loads taken up since the last step, those it must wait for, and saves of blocks that it fills."""
        coordinator = self._coordinator
        if coordinator is None:
            return StepMetadata(None)
        self._count_step(output, since=self._stepped_at)
        self._tick()
        if self._off is None and self._saves:
            self._observe(coordinator, output)
        coordinator.stepped(output.num_scheduled_tokens, self._rates.step_s)
        plan = coordinator.plan(forward=bool(output.num_scheduled_tokens))
        if self._computes_hit or (plan is not None and plan.jobs):
            plan = dataclasses.replace(plan or StepPlan(step=0), work=self._work(output))
            self._computes_hit = False
        if self._config.sanitize:
            plan = dataclasses.replace(plan or StepPlan(step=0), model=self._model_access(output))
        if plan is not None and plan.gated:
            output.has_sync_kv_loads = True
        self._failed.update(coordinator.take_failed())
        metadata = StepMetadata(plan, frozenset(self._failed))
        self._failed.clear()
        self._log_interval()
        if self._rate_store is not None:
            self._rate_store.step()
        return metadata

    def _count_step(self, output: SchedulerOutput, *, since: float) -> None:
        """Learn how long a step that only decodes takes: from one to the next, once nothing else is under way."""
        speculative = self._vllm_config.speculative_config
        most = len(output.num_scheduled_tokens) * (1 if speculative is None else 1 + speculative.num_speculative_tokens)
        # Two steps may be in flight, so the interval is the duration of one of the three before.
        if self._decode_steps >= STEPS_APART:
            self._rates.decoded(time.monotonic() - since)
        self._decode_steps = self._decode_steps + 1 if 0 < output.total_num_scheduled_tokens <= most else 0

    def _work(self, output: SchedulerOutput) -> StepWork | None:
        """What the step computes; None if nothing, or if a request is not known."""
        pairs = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                return None
            pairs += attended(scheduled, request.num_computed_tokens)
        tokens = output.total_num_scheduled_tokens
        return StepWork(tokens=tokens, pairs=pairs) if tokens else None

    def _observe(self, coordinator: Coordinator, output: SchedulerOutput) -> None:
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            hashes = self._hashes.of(request)
            if self._events is not None:
                self._events.seen(request, hashes)
            coordinator.observe(
                request_id,
                hashes,
                # Scheduled tokens include drafts and placeholders; only tokens that are known have final KV.
                min(request.num_computed_tokens + scheduled, request.num_tokens),
                lambda request_id=request_id: self._tables(state.resolve_block_ids(request_id)),  # type: ignore[misc]
                step_tokens=scheduled,
            )

    def _tables(self, block_ids: Sequence[list[int]]) -> list[list[int]]:
        """A request's blocks in each group that is streamed, -1 where a window has passed them.

        vLLM puts its null block there, which belongs to nobody.
        """
        tables = [block_ids[number] for number in self._groups.ids]
        if not any(self._groups.windowed):
            return tables
        assert self._holds.pool is not None
        null = self._holds.pool.null_block.block_id
        return [
            [-1 if block == null else block for block in table] if windowed else table
            for table, windowed in zip(tables, self._groups.windowed, strict=True)
        ]

    def _model_access(self, output: SchedulerOutput) -> tuple[ModelAccess, ...]:
        """Of each group: blocks that attention reads in this step, and those that get the KV of the step's tokens."""
        state, size = output.kv_connector_block_state, self._block_tokens
        reads: list[list[int]] = [[] for _ in self._groups.ids]
        writes: list[list[int]] = [[] for _ in self._groups.ids]
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            computed = request.num_computed_tokens
            stop = -(-(computed + scheduled) // size)
            for place, blocks in enumerate(self._tables(state.resolve_block_ids(request_id))):
                reads[place] += [block for block in blocks[:stop] if block >= 0]
                writes[place] += [block for block in blocks[computed // size : stop] if block >= 0]
        return tuple(ModelAccess(reads=tuple(r), writes=tuple(w)) for r, w in zip(reads, writes, strict=True))

    def _tick(self) -> None:
        """Deadlines of jobs count the engine's time: a rank that computes for minutes cannot answer meanwhile."""
        now = time.monotonic()
        self._seconds += min(now - self._stepped_at, LONGEST_STEP_S)
        self._stepped_at = now

    def update_output(self, output: KVConnectorOutput) -> None:
        """Book the ranks' reports; parked requests whose loads are complete, or far enough, are released by
        adding them to `output`."""
        coordinator = self._coordinator
        if coordinator is None:
            return
        if output.invalid_block_ids:
            coordinator.distrust(output.invalid_block_ids)
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, WorkerReport):
            return
        if self._exporter is not None:
            self._exporter.add(meta.report)
        self._moved = self._moved.merge(meta.report.stats)
        self._rates.learn(meta.report.measured)
        for place, traffic in meta.report.tiers.items():
            self._tier_traffic[place] = traffic.merge(self._tier_traffic.get(place, TierTraffic()))
        if meta.report.failed and self._off is None:
            # The device's streams run nothing after a failure, and a CUDA context is lost with its first.
            self._off = "a rank failed to move blocks"
            logger.error("LayerStream is off until the engine is restarted: %s; its log has the cause", self._off)
        outcome = coordinator.report(meta.report)
        if self._pool_grows and coordinator.pool_slots == coordinator.planned_slots:
            self._pool_grows = False
            logger.info("LayerStream: all %d slots of the pool are ready on every rank", coordinator.pool_slots)
        self._failed.update(outcome.failed)
        if outcome.received:
            output.finished_recving = {*(output.finished_recving or ()), *outcome.received}

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens that a request was just admitted to load were found -> how many; they sum to `tokens`."""
        media = {spec.name: spec.tier.medium for spec in self._tiers}
        sources: dict[CacheHitSource, int] = {}
        found = self._coordinator.hit_sources(request.request_id) if self._coordinator is not None else {}
        for name, count in found.items():
            source = SOURCES.get(media.get(name, HOST), CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + count
        if sum(sources.values()) == tokens:
            return sources
        return {CacheHitSource.HOST: tokens} if tokens else {}

    def take_sample(self) -> Sample | None:
        """What the metrics say since the last call; None if nothing has changed."""
        return None if self._exporter is None else self._exporter.take()

    def take_events(self) -> list[KVCacheEvent]:
        """What the host pool and tiers came to hold and lost since the last call; nothing if vLLM publishes nothing."""
        return [] if self._events is None else self._events.take()

    def finished(self, request_id: str) -> None:
        """A request ended or was aborted; its jobs go on."""
        self._requests.pop(request_id, None)
        self._asked.pop(request_id, None)
        if self._coordinator is not None:
            self._coordinator.finish(request_id)
        self._hashes.forget(request_id)
        if self._events is not None:
            self._events.forget(request_id)

    def pending(self) -> bool:
        """Whether a rank's report is due, or something must still be told to the ranks."""
        return self._coordinator is not None and (self._coordinator.pending or bool(self._failed))

    def reset(self) -> bool:
        """Forget every block. True if nothing was in flight; what was is never published."""
        if self._events is not None:
            self._events.leave_tiers()
        return self._coordinator is None or self._coordinator.reset()

    def close(self) -> None:
        """Say what the last, unfinished interval held, and let go of the tiers."""
        tiering = self._coordinator.tiering if self._coordinator is not None else None
        if tiering is not None:
            tiering.leave()
        self._log_interval(last=True)
        if self._rate_store is not None:
            self._rate_store.write()
        if tiering is not None:
            tiering.close(CLOSE_TIERS_S)

    def _log_interval(self, *, last: bool = False) -> None:
        interval = self._config.log_interval_s
        now = time.monotonic()
        if self._coordinator is None or interval == 0 or (now - self._logged_at < interval and not last):
            return
        self._logged_at = now
        cache = self._coordinator.take_stats()
        if self._moved or cache:
            logger.info(
                interval_line(
                    cache,
                    self._moved,
                    pool_used=self._coordinator.pool_used,
                    pool_slots=self._coordinator.pool_slots,
                )
            )
        self._moved = TransferStats()
        if self._coordinator.tiering is not None:
            self._log_tiers(self._coordinator.tiering)

    def _log_tiers(self, tiering: Tiering) -> None:
        counts, traffic = tiering.take_counts(), self._tier_traffic
        self._tier_traffic = {}
        if counts or traffic:
            named = {tiering.clients[place].name: moved for place, moved in sorted(traffic.items())}
            ill = [tier.name for tier in tiering.clients if tiering.stopped or not tier.healthy]
            logger.info(tiers_line(counts, named, ill=ill))
