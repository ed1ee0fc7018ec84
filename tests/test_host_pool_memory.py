"""What the system does with the pool's memory."""

from __future__ import annotations

from pathlib import Path

from layerstream.host_pool import HostPool


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds `address` (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if head == "VmFlags:" and inside:
            return set(rest)
        if not head.endswith(":"):
            first, end = (int(part, 16) for part in head.split("-"))
            inside = first <= address < end
    raise AssertionError(f"{address:#x} is not mapped")


def test_the_pool_is_neither_forked_nor_dumped() -> None:
    pool = HostPool(page_bytes=[4096], chunk_blocks=1, budget_bytes=1 << 20)
    assert {"dc", "dd"} <= flags_of(pool.span(0, 0, 1).data_ptr())
    pool.close()
