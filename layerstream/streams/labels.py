"""Names of memory, for messages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Labels:
    """Names of address ranges. Where several cover an address, the one that starts last counts."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._named: dict[int, tuple[int, str]] = {}

    def add(self, start: int, end: int, name: str) -> None:
        """Name the bytes from `start` to before `end`; a name that starts at the same place is replaced."""
        if start not in self._named:
            self._starts.insert(bisect_left(self._starts, start), start)
        self._named[start] = (end, name)

    def forget(self, start: int, end: int) -> None:
        """Drop the names that start within these bytes."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        for named in self._starts[first:last]:
            del self._named[named]
        del self._starts[first:last]

    def name(self, address: int) -> str:
        """The name and the distance from its start: "KV of layer 3 + 0x1200"; the bare address if it has none."""
        for start in reversed(self._starts[: bisect_right(self._starts, address)]):
            end, name = self._named[start]
            if address < end:
                return f"{name} + {address - start:#x}"
        return f"{address:#x}"
