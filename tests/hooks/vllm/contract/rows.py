"""How vLLM's pages hold what a token has in a KV head, which portable chunks rely on."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Methods, Names, Order
from tests.hooks.vllm.contract.searches import Defined

_BACKENDS: Final = "v1/attention/backends"
_SPECS: Final = "v1/kv_cache_interface.py"
_WHY: Final = "a row is the key, then the value, in the last dimension of the view (portable.PLAIN_BACKENDS)"

ROWS: Final[tuple[Fact, ...]] = (
    Members(
        file=_SPECS,
        cls="AttentionSpec",
        only="num_kv_heads head_size head_size_v dtype num_head_slots state_content_bytes max_tp_shards "
        "tokens_per_state",
        why="what a row is, and who packs it (portable.head_groups)",
    ),
    Methods(
        file=_SPECS,
        cls="AttentionSpec",
        only="num_heads state_content_size_bytes",
        why="bytes of a row, if it is plain (portable.head_groups)",
    ),
    Members(file=_SPECS, cls="MLAAttentionSpec", only="cache_dtype_str head_size_v", why="as above, with MLA"),
    *(
        Order(
            file=f"{_BACKENDS}/{file}.py",
            function=f"{cls}.do_kv_cache_update",
            watched="transpose split head_size reshape_and_cache_flash triton_reshape_and_cache_flash "
            "triton_reshape_and_cache_flash_diffkv",
            why=_WHY,
        )
        for file, cls in (
            ("flash_attn", "FlashAttentionImpl"),
            ("flash_attn_diffkv", "FlashAttentionDiffKVImpl"),
            ("flashinfer", "FlashInferImpl"),
            ("flex_attention", "FlexAttentionImpl"),
            ("triton_attn", "TritonAttentionImpl"),
        )
    ),
    Order(
        file="v1/attention/backend.py",
        function="MLAAttentionImpl.do_kv_cache_update",
        watched="concat_and_cache_mla",
        why="a row is one latent vector (portable.PLAIN_BACKENDS)",
    ),
    Order(
        file=f"{_BACKENDS}/mla/cpu_mla.py",
        function="CPUMLAImpl.do_kv_cache_update",
        watched="flat slots kv_lora_rank kv_c_normed k_pe_sq",
        why="as above",
    ),
    Defined(
        name="do_kv_cache_update",
        folders=("v1/attention",),
        why="MLA's plain backends have none of their own (portable.PLAIN_BACKENDS)",
    ),
    Names(
        file="v1/core/kv_cache_utils.py",
        names="get_request_block_hasher",
        why="hashes of fewer tokens than a block (FinerHashes)",
    ),
    Order(
        file="v1/core/kv_cache_utils.py",
        function="get_request_block_hasher.request_block_hasher",
        watched="block_hashes hash_block_size num_tokens hash_block_tokens",
        why="whole blocks from the request's last hash on (FinerHashes)",
    ),
    Names(
        file="utils/hashing.py", names="get_hash_fn_by_name", why="hashes of fewer tokens than a block (FinerHashes)"
    ),
)
