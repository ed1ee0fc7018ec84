"""Serve one long prompt twice; the second time its KV comes from LayerStream's host pool.

    python examples/offline.py HuggingFaceTB/SmolLM2-135M-Instruct

Any model vLLM serves will do, by name or as a folder. vLLM's own prefix cache is cleared in between, which stands for
what happens to it under load: other requests need the GPU's blocks.
"""

from __future__ import annotations

import argparse
import time

from vllm import LLM, SamplingParams

STORY = (
    "The ferry left at six. Marten counted the crates twice, wrote the number on his sleeve, and went below to wait "
    "for the fog to lift. Nobody had told him what was in the ninth one. "
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", help="name on the Hugging Face hub, or a folder")
    arguments.add_argument("--dtype", default="auto", help="as vLLM's; float32 is faster on CPUs without AVX-512")
    arguments.add_argument("--host-gib", type=float, default=1.0, help="host memory for KV, per rank")
    chosen = arguments.parse_args()

    llm = LLM(
        model=chosen.model,
        dtype=chosen.dtype,
        max_model_len=2048,
        kv_transfer_config={
            "kv_connector": "LayerStreamConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_gib": chosen.host_gib},
        },
    )
    prompt = STORY * 30 + "What is in the ninth crate?"
    params = SamplingParams(max_tokens=32, temperature=0.0)

    def serve(what: str) -> None:
        begun = time.perf_counter()
        answer = llm.generate(prompt, params, use_tqdm=False)[0]
        print(
            f"{what}: {time.perf_counter() - begun:.2f} s, {answer.num_cached_tokens} of "
            f"{len(answer.prompt_token_ids)} prompt tokens not computed: {answer.outputs[0].text!r}"
        )

    serve("cold")
    while not llm.reset_prefix_cache():  # False while the last blocks are still being saved
        time.sleep(0.01)
    serve("through LayerStream")


# vLLM starts its processes by importing this file again.
if __name__ == "__main__":
    main()
