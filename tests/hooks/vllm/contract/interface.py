"""Classes and functions of vLLM that ours derive from, register with and fill."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Methods, Names, Order

_BASE: Final = "distributed/kv_transfer/kv_connector/v1/base.py"
_MULTI: Final = "distributed/kv_transfer/kv_connector/v1/multi_connector.py"
_FACTORY: Final = "distributed/kv_transfer/kv_connector/factory.py"

INTERFACE: Final[tuple[Fact, ...]] = (
    Methods(
        file=_BASE,
        cls="KVConnectorBase_V1",
        why="LayerStreamConnector overrides what it needs and leaves the rest at its default (connector.py)",
    ),
    Members(file=_BASE, cls="KVConnectorBase_V1", only="_cache_hit_source", why="hits are shown as the host's"),
    Methods(file=_BASE, cls="SupportsHMA", why="without it, vLLM turns its hybrid cache manager off (connector.py)"),
    Members(file=_BASE, cls="KVConnectorRole", why="the two halves are told apart by it (connector.py)"),
    Members(file=_BASE, cls="KVConnectorTransferResults", why="failed parked loads are told with it (connector.py)"),
    Methods(file=_BASE, cls="KVConnectorWorkerMetadata", why="reports of ranks are merged by it (messages.py)"),
    Names(
        file=_BASE,
        names="KVConnectorMetadata KVConnectorHandshakeMetadata supports_hma",
        why="bases of what vLLM carries between the halves (messages.py)",
    ),
    Members(
        file="v1/outputs.py",
        cls="KVConnectorOutput",
        why="reports come in it, and parked requests are released through it (SchedulerHalf.update_output)",
    ),
    Order(
        file="v1/outputs.py",
        function="KVConnectorOutput.is_empty",
        watched="finished_sending finished_recving invalid_block_ids failed_recving kv_connector_worker_meta",
        why="an output without a report may be left out, one with a report may not (messages.py)",
    ),
    Members(file="v1/metrics/cache_hit_source.py", cls="CacheHitSource", why="hits are shown as the host's"),
    Methods(file=_FACTORY, cls="KVConnectorFactory", only="register_connector create_connector", why="register.py"),
    Members(file=_FACTORY, cls="KVConnectorFactory", only="_registry", why="whether it is registered (register.py)"),
    Names(file="plugins/__init__.py", names="DEFAULT_PLUGINS_GROUP", why="how vLLM finds register.py in each process"),
    Names(file="logger.py", names="init_logger", why="every log line"),
    *(
        Order(
            file=_MULTI,
            function=f"MultiConnector.{name}",
            watched="get_num_new_matched_tokens update_state_after_alloc chosen_connector _requests_to_connector toks "
            "to_return get_handshake_metadata set_xfer_handshake_metadata_pp_aware metadata",
            why="beside another connector: who is asked, who loads, whose ranks are heard (SchedulerHalf.set_ranks)",
        )
        for name in (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "get_handshake_metadata",
            "set_xfer_handshake_metadata_pp_aware",
        )
    ),
)
