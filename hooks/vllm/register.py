"""The plugin entry point: makes `"kv_connector": "LayerStreamConnector"` known to vLLM in every process."""

from __future__ import annotations

NAME = "LayerStreamConnector"
MODULE = "layerstream.hooks.vllm.connector"


def register() -> None:
    """Register the connector. vLLM calls this once per process, and tests more often: repeating it changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
