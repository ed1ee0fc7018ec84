"""What device work costs in virtual time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What work costs: seconds, and bytes a second.

    The defaults are assumptions for comparing plans, round numbers of the order that a data-centre GPU should show:
    PCIe 5.0 x16 (63 GB/s each way before protocol), HBM3, launches from Python. Measure a machine for its own.
    """

    copy_bytes_per_s: float = 50e9
    """Of a copy between host and device, in each direction."""
    copy_latency_s: float = 5e-6
    """From the start of a copy, or of a batch, to its first byte."""
    row_s: float = 0.5e-6
    """On the copy engine, for each row of a batch."""
    kernel_bytes_per_s: float = 2e12
    """Of a kernel, and of a copy within one memory: bytes read plus bytes written."""
    kernel_latency_s: float = 3e-6
    launch_s: float = 10e-6
    """Of the host, to queue a copy, a batch, a kernel, a graph or the model's work."""
    event_s: float = 1e-6
    """Of the host, to record an event or to wait for one."""
    submit_row_s: float = 0.0
    """Of the host, for each row of a batch."""
