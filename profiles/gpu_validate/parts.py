"""Everything that is validated, in the order it runs."""

from __future__ import annotations

from profiles.gpu_validate import (
    exact_kernels,
    full_graphs,
    idle,
    interference,
    kernel_rates,
    mini,
    ordering,
    paths,
    pinning,
    submission,
    tables,
)
from profiles.gpu_validate.checks import Check, Part

PARTS = (
    Part(
        "kernels",
        95.0,
        (
            Check("kernels: pages of one layer", exact_kernels.pages_are_exact, limit_s=90.0),
            Check("kernels: several layers", exact_kernels.stacks_are_exact),
            Check("kernels: captured launch", exact_kernels.captured_launch_serves_any_count, gpu_only=True),
            Check("kernels: past 2**31 elements", exact_kernels.far_pages_are_exact, gpu_only=True),
            Check("kernels: rates", kernel_rates.kernels_keep_up, gpu_only=True),
            Check("kernels: host time of one launch", kernel_rates.launch_costs_the_host, gpu_only=True),
        ),
    ),
    Part(
        "paths",
        125.0,
        (
            Check("paths: calibration", paths.table_is_measured),
            Check("paths: bytes and rates", paths.paths_reach_the_roof, limit_s=100.0),
            Check("paths: host time to submit", submission.submission_is_short),
            Check("paths: plain torch", submission.plain_torch_for_comparison),
        ),
    ),
    Part(
        "ordering",
        50.0,
        (
            Check("ordering: edges of all paths", ordering.edges_hold),
            Check("ordering: poll", ordering.polls_are_never_early),
            Check("ordering: tables", tables.tables_outlive_their_readers, gpu_only=True),
            Check("ordering: uploads", tables.uploads_are_not_overwritten, gpu_only=True),
        ),
    ),
    Part(
        "engine",
        75.0,
        (
            Check("engine: eager, staged", mini.served("eager, staged", {"transfer_path": "staged"}, graphs=False)),
            Check(
                "engine: piecewise graphs, auto", mini.served("piecewise graphs, auto", {}, graphs=True), gpu_only=True
            ),
            Check("engine: loads stage ahead", mini.loads_stage_ahead),
            Check("engine: steps beside other loads", mini.steps_beside_other_loads),
        ),
    ),
    Part(
        "graphs",
        50.0,
        (
            Check("FULL graph behind a load", full_graphs.graph_waits_for_whole_load),
            Check("a wait behind a replay", full_graphs.records_are_seen, limit_s=20.0),
            Check("captured external waits", full_graphs.when_waits_look, gpu_only=True, limit_s=20.0),
            Check("cuStreamWaitValue32", full_graphs.value_waits_can_be_captured, gpu_only=True, limit_s=20.0),
            Check("in-graph flags", full_graphs.in_graph_waits("flags"), gpu_only=True, limit_s=20.0),
            Check("in-graph events", full_graphs.in_graph_waits("events"), gpu_only=True, limit_s=20.0),
            Check("in-graph waits: cost", full_graphs.waits_cost_little, gpu_only=True, limit_s=20.0),
        ),
    ),
    Part(
        "interference",
        75.0,
        (
            Check("interference: small uploads", interference.small_uploads_pass, gpu_only=True),
            Check("interference: steps beside loads", interference.steps_beside_loads, gpu_only=True),
        ),
    ),
    Part("idle", 15.0, (Check("idle steps", idle.idle_steps_cost_nothing),)),
    Part("pinning", 25.0, (Check("host pool", pinning.pool_becomes_usable),)),
)
"""Their budgets together are a little more than eight minutes; what is left of those limits each of them as well."""
