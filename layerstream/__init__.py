"""KV cache kept outside the GPU and streamed back layer by layer.

The package is used through vLLM (`--kv-transfer-config '{"kv_connector":"LayerStreamConnector","kv_role":"kv_both"}'`)
or through its modules, imported by name. Importing `layerstream` itself loads neither torch nor triton nor vllm.
"""

__version__ = "0.1.0"
