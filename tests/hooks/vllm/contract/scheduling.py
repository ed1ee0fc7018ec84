"""What the scheduler half is called with, in which order, and what vLLM's scheduler makes of its answers."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Methods, Names, Order
from tests.hooks.vllm.contract.searches import Writes

_SCHEDULER: Final = "v1/core/sched/scheduler.py"
_HASHES: Final = "v1/core/kv_cache_utils.py"
_MANAGERS: Final = "v1/core/single_type_kv_cache_manager.py"

SCHEDULING: Final[tuple[Fact, ...]] = (
    Order(
        file=_SCHEDULER,
        function="Scheduler.__init__",
        watched="connector create_connector bind_kv_cache_manager requires_kv_delivery KVCacheManager defer_block_free "
        "defer_async_loads is_kv_consumer",
        why="the block pool is bound before any request comes; freed blocks of steps in flight are held for loads",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.schedule",
        watched="get_num_new_matched_tokens ext_tokens load_kv_async num_external_computed_tokens "
        "allocate_slots delay_cache_blocks update_state_after_alloc get_blocks has_sync_kv_loads KVConnectorBlockState "
        "resolve_block_ids SchedulerOutput kv_connector_block_state _build_kv_connector_meta kv_connector_metadata "
        "WAITING_FOR_REMOTE_KVS has_pending_block_frees block_hashes resumable num_hash_lookahead_tokens "
        "_update_after_schedule",
        why="matched, then allocated, then step_metadata; None is asked again; what is not parked makes the step load "
        "before its forward (SchedulerHalf.matched_tokens, allocated, step_metadata)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._build_kv_connector_meta",
        watched="build_connector_meta",
        why="the step's plan, and has_sync_kv_loads set with it, reach the ranks (SchedulerHalf.step_metadata)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._update_after_schedule",
        watched="num_computed_tokens num_scheduled_tokens",
        why="when a step is planned, num_computed_tokens does not count its own tokens (SchedulerHalf._observe)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._preempt_request",
        watched="_free_request_blocks num_computed_tokens",
        why="a preempted request loses its blocks unasked and starts at 0 (holds, Coordinator.admit)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.update_from_output",
        watched="_handle_failed_recving _handle_invalid_blocks failed_recving invalid_block_ids "
        "_update_from_kv_xfer_finished finish_requests get_kv_connector_stats take_events publish",
        why="failed loads are handled before the reports are booked, in the same step, and counts and events are taken "
        "after them (SchedulerHalf.update_output, take_sample, take_events)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._update_from_kv_xfer_finished",
        watched="update_connector_output finished_recving finished_sending requests status WAITING_FOR_REMOTE_KVS "
        "finished_recving_kv_req_ids is_finished _free_blocks",
        why="requests that update_output adds to finished_recving are released right after it, and must be known",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._update_waiting_for_remote_kv",
        watched="failed_recving_kv_req_ids cache_blocks num_computed_tokens free",
        why="what a parked load brought is a hit of vLLM's own from then on; a failed one is computed",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._connector_finished",
        watched="request_finished request_finished_all_groups SupportsHMA",
        why="the request is forgotten, and its blocks are freed at once (SchedulerHalf.finished)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.finish_requests",
        watched="WAITING_FOR_REMOTE_KVS delay_free_blocks finished_recving_kv_req_ids _free_request",
        why="blocks of an aborted parked load stay until its report has come",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.has_requests",
        watched="connector has_unfinished_requests has_finished_requests has_pending_push_work",
        why="the engine steps on while a report is due (SchedulerHalf.pending)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.reset_connector_cache",
        watched="reset_cache",
        why="weights changed: nothing saved before may be a hit (SchedulerHalf.reset)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler.reset_prefix_cache",
        watched="_preempt_request reset_prefix_cache reset_connector reset_connector_cache",
        why="requests that ran are preempted, and get new blocks before they are saved from again (Coordinator.reset)",
    ),
    Order(file=_SCHEDULER, function="Scheduler.shutdown", watched="connector shutdown", why="the tiers are let go of"),
    Members(
        file="v1/core/sched/output.py",
        cls="SchedulerOutput",
        only="num_scheduled_tokens total_num_scheduled_tokens finished_req_ids has_sync_kv_loads kv_connector_metadata "
        "kv_connector_block_state",
        why="read and set while a step is planned (SchedulerHalf.step_metadata)",
    ),
    Members(file="v1/core/sched/output.py", cls="KVConnectorBlockState", why="a scheduled request's blocks (_observe)"),
    Members(
        file="v1/request.py",
        cls="Request",
        only="request_id block_hashes num_computed_tokens num_tokens num_prompt_tokens cache_salt",
        why="what the coordinator is asked with (SchedulerHalf.matched_tokens, allocated, _observe)",
    ),
    Order(
        file="v1/request.py",
        function="Request.update_block_hashes",
        watched="block_hashes extend _block_hasher",
        why="one list object, extended in place: who keeps it sees it grow (coordinator.py, tiering)",
    ),
    Order(
        file=_SCHEDULER,
        function="Scheduler._update_request_as_session",
        watched="block_hashes hash_block_size keep_end num_computed_tokens num_tokens",
        why="a session drops its last token: the hashes that go are those of blocks whose KV is not complete",
    ),
    Writes(
        attribute="block_hashes",
        folders=("v1",),
        why="hashes of blocks that are computed stay as they are, in one list object (coordinator.py, tiering)",
    ),
    Methods(
        file="v1/core/kv_cache_manager.py",
        cls="KVCacheBlocks",
        only="get_block_ids",
        why="ids per group, in prefix order (SchedulerHalf.allocated)",
    ),
    Members(
        file="v1/core/block_pool.py",
        cls="BlockPool",
        only="blocks null_block",
        why="blocks by id (BlockPoolHolds); the one that stands for blocks a window has passed (SchedulerHalf._tables)",
    ),
    Order(
        file=_MANAGERS,
        function="SingleTypeKVCacheManager.add_local_computed_blocks",
        watched="num_skipped_tokens get_num_skipped_tokens num_skipped_blocks _null_block req_blocks",
        why="what a window has passed of a hit is the null block, from its start on (SchedulerHalf._tables)",
    ),
    Order(
        file=_MANAGERS,
        function="SingleTypeKVCacheManager.allocate_external_computed_blocks",
        watched="get_num_skipped_tokens num_external_computed_tokens get_new_blocks req_blocks",
        why="the rest of an external hit gets blocks in every group (Coordinator.admit)",
    ),
    Order(
        file=_MANAGERS,
        function="SingleTypeKVCacheManager._remove_blocks_in_range",
        watched="_null_block blocks free_blocks",
        why="a running request's passed blocks become the null block, in its table too (Coordinator.observe)",
    ),
    Order(
        file="v1/core/block_pool.py",
        function="BlockPool.touch",
        watched="ref_cnt free_block_queue remove is_null",
        why="a hold is a reference, also of a block that is free (BlockPoolHolds.hold)",
    ),
    Order(
        file="v1/core/block_pool.py",
        function="BlockPool.free_blocks",
        watched="ref_cnt is_null free_block_queue prepend_n append_n",
        why="a block is free with its last reference, and the first given is evicted first (BlockPoolHolds.release)",
    ),
    Names(
        file=_HASHES,
        names="get_none_hash_seed resolve_none_hash_seed DEFAULT_NONE_HASH_SEED _NON_CRYPTO_HASH_FUNCTIONS",
        why="what block hashes begin with, and where that is random (identify.py)",
    ),
    Order(
        file=_HASHES,
        function="init_none_hash",
        watched="_NONE_HASH_SEED resolve_none_hash_seed NONE_HASH",
        why="the seed is that of the hashes in use (identify.py)",
    ),
    Names(
        file=_HASHES,
        names="hash_block_tokens generate_block_hash_extra_keys",
        why="a hash covers the parent's hash, the block's tokens and what else changes its KV (identity.py)",
    ),
    Order(
        file=_HASHES,
        function="hash_block_tokens",
        watched="hash_function parent_block_hash NONE_HASH curr_block_token_ids_tuple extra_keys",
        why="as above",
    ),
    Order(
        file=_HASHES,
        function="generate_block_hash_extra_keys",
        watched="_gen_mm_extra_hash_keys _gen_lora_extra_hash_keys _gen_prompt_embeds_extra_hash_keys mm_extra_keys "
        "lora_extra_keys cache_salt_keys prompt_embeds_keys cache_salt extra_keys",
        why="inputs, adapters, embeddings and salts are in the hash, so nothing else has to tell them apart",
    ),
)
