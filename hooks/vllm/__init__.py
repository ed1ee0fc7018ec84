"""layerstream as a KV connector of vLLM. Nothing outside this folder imports vllm."""
