"""What carries counts and cache events to vLLM's endpoint, log and publisher."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Methods, Names, Order

_METRICS: Final = "distributed/kv_transfer/kv_connector/v1/metrics.py"
_EVENTS: Final = "distributed/kv_events.py"
_HASHES: Final = "v1/core/kv_cache_utils.py"
_POOL: Final = "v1/core/block_pool.py"

TELEMETRY: Final[tuple[Fact, ...]] = (
    Methods(file=_METRICS, cls="KVConnectorStats", why="LayerStreamStats derives from it (stats.py)"),
    Methods(file=_METRICS, cls="KVConnectorPromMetrics", why="LayerStreamPromMetrics derives from it (stats.py)"),
    Order(
        file=_METRICS,
        function="KVConnectorLogging.observe",
        watched="build_kv_connector_stats aggregate transfer_stats_accumulator",
        why="steps are added up in their order, so that the last gauge counts (LayerStreamStats.aggregate)",
    ),
    Order(
        file="v1/core/sched/scheduler.py",
        function="Scheduler.make_stats",
        watched="to_dict kv_connector_stats log_stats",
        why="what was taken is sent, or nothing ever is (SchedulerHalf.take_sample)",
    ),
    Order(
        file="v1/metrics/loggers.py",
        function="PrometheusStatLogger.record",
        watched="kv_connector_prom kv_connector_stats hits_by_source",
        why="each step's counts are observed once, with the engine's number (LayerStreamPromMetrics.observe)",
    ),
    Order(
        file="v1/metrics/stats.py",
        function="PrefixCacheStats.record",
        watched="preempted hits_by_source EXTERNAL_UNSPECIFIED num_hits",
        why="sources that do not sum to the hit are thrown away (SchedulerHalf.hit_sources)",
    ),
    Order(
        file="v1/metrics/prometheus.py",
        function="unregister_vllm_metrics",
        watched="startswith unregister",
        why="the prefix of our names (layerstream.metric_table.PREFIX)",
    ),
    Members(file=_EVENTS, cls="BlockStored", why="what is said of a copy (events.py)"),
    Members(file=_EVENTS, cls="BlockRemoved", why="what is said of a copy that goes (events.py)"),
    Names(file=_EVENTS, names="MEDIUM_CPU", why="what the host pool is called"),
    Names(
        file=_HASHES,
        names="generate_block_hash_extra_keys to_event_extra_keys maybe_convert_block_hash",
        why="hashes and extra keys are said as vLLM says them (events.py)",
    ),
    Order(
        file=_POOL,
        function="BlockPool._build_block_stored_event",
        watched="BlockStored medium session_id",
        why="our events say the same of a block (KVEvents)",
    ),
    Members(
        file="config/kv_events.py",
        cls="KVEventsConfig",
        only="enable_kv_cache_events",
        why="whether anything is described (SchedulerHalf)",
    ),
)
