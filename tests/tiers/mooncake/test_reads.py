from __future__ import annotations

from typing import Any, cast

import pytest

from layerstream.errors import TierError
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.ranges import Range
from layerstream.tiers.mooncake.reads import SessionReader, read_whole


class Client:
    """A store whose leases last `lease_s` of a clock that each range moves on by `range_s`."""

    def __init__(self, *, lease_s: float = 100.0, range_s: float = 1.0) -> None:
        self.now, self.lease_s, self.range_s = 0.0, lease_s, range_s
        self.codes: dict[str, int] = {}
        self.granted: dict[str, float] = {}
        self.moved: list[tuple[str, int]] = []
        self.starts: list[list[str]] = []
        self.whole: list[str] = []
        self.sizes: dict[str, int] = {}
        self.expired = 0

    def start_get(self, keys: list[str]) -> list[int]:
        assert not self.granted, "a session is open"
        self.starts.append(list(keys))
        codes = [self.codes.get(key, 0) for key in keys]
        self.granted = {key: self.now for key, code in zip(keys, codes, strict=True) if code == 0}
        return codes

    def get_range(self, key: str, pointers: list[int], sizes: list[int], _: list[int]) -> int:
        self.now += self.range_s
        if self.now - self.granted[key] >= self.lease_s:
            self.expired += 1
            return -707
        self.moved.append((key, pointers[0]))
        return sum(sizes)

    def end_get(self, _: list[str]) -> None:
        self.granted = {}

    def get_whole(self, keys: list[str], _: Any, sizes: list[list[int]]) -> list[int]:
        self.whole += keys
        codes = [self.codes.get(key, 0) for key in keys]
        return [sum(each) if code in {0, -702} else code for code, each in zip(codes, sizes, strict=True)]

    def size(self, key: str) -> int:
        return self.sizes.get(key, 40)


WHOLE = Range(pointers=[1, 2, 3, 4], sizes=[10] * 4, offsets=[0, 10, 20, 30])


def read(client: Client, names: str, *, lease_s: float | None = None) -> int:
    reader = SessionReader(
        cast(MooncakeClient, client), ranges=1, lease_s=lease_s or client.lease_s, clock=lambda: client.now
    )  # fmt: skip
    count = reader.read(list(names), [WHOLE] * len(names))
    assert not client.granted, "a session was left open"
    return count


def all_parts(names: str) -> list[tuple[str, int]]:
    return [(name, pointer) for name in names for pointer in WHOLE.pointers]


def test_one_session_serves_a_batch_that_fits_its_lease() -> None:
    client = Client()
    assert read(client, "abc") == 3
    assert client.moved == all_parts("abc") and client.starts == [["a", "b", "c"]]


@pytest.mark.parametrize("lease_s", [3.0, 5.0, 6.0])
def test_a_session_is_started_again_before_its_lease_runs_out(lease_s: float) -> None:
    client = Client(lease_s=lease_s)
    assert read(client, "abc") == 3
    assert client.moved == all_parts("abc") and len(client.starts) > 2 and not client.expired


def test_a_lease_that_ran_out_is_started_again_where_reading_was() -> None:
    client = Client(lease_s=3.0)
    assert read(client, "abc", lease_s=100.0) == 3
    assert client.moved == all_parts("abc") and client.starts[1] == ["a", "b", "c"] and client.starts[2] == ["b", "c"]
    assert client.expired


def test_leases_that_never_last_for_one_range_are_given_up() -> None:
    client = Client(lease_s=0.5)
    with pytest.raises(TierError, match=r"3 times in a row before 10 bytes of object a .*default_kv_lease_ttl"):
        read(client, "ab")
    assert len(client.starts) == 3 and not client.granted


@pytest.mark.parametrize("code", [-704, -703, -710, -712, -714])
def test_objects_before_one_that_is_missing_are_read(code: int) -> None:
    client = Client()
    client.codes["c"] = code
    assert read(client, "abcd") == 2
    assert client.moved == all_parts("ab")


def test_an_object_that_went_missing_between_two_leases_ends_the_read() -> None:
    client = Client(lease_s=6.0)
    start = client.start_get

    def starting(keys: list[str]) -> list[int]:
        if client.moved:
            client.codes["b"] = -704
        return start(keys)

    client.start_get = starting  # type: ignore[method-assign]
    assert read(client, "ab") == 1


def test_an_object_on_an_owners_disk_is_read_whole() -> None:
    client = Client()
    client.codes["b"] = -702
    assert read(client, "abc") == 3
    assert client.moved == all_parts("a") + all_parts("c") and client.whole == ["b"]


@pytest.mark.parametrize("code", [-800, -600, -900, 9, 11])
def test_a_range_that_did_not_arrive_exactly_is_an_error_with_its_number(code: int) -> None:
    client = Client()
    move = client.get_range
    client.get_range = lambda *a: code if len(client.moved) == 5 else move(*a)  # type: ignore[method-assign]
    with pytest.raises(TierError, match=f"object b failed: {code} "):
        read(client, "abc")
    assert not client.granted


@pytest.mark.parametrize("size", [39, 41])
@pytest.mark.parametrize("code", [-600, -800])
def test_an_object_of_another_size_counts_as_missing(code: int, size: int) -> None:
    client = Client()
    client.sizes["b"] = size
    move = client.get_range
    client.get_range = lambda key, *a: code if key == "b" else move(key, *a)  # type: ignore[method-assign]
    assert read(client, "abc") == 1
    client.codes["b"] = code
    assert whole(client, "abc") == 1


@pytest.mark.parametrize("size", [-704, -900, -901])
def test_an_object_whose_size_is_not_known_is_an_error(size: int) -> None:
    client = Client()
    client.sizes["b"], client.codes["b"] = size, -800
    with pytest.raises(TierError, match="object b failed: -800"):
        whole(client, "abc")


@pytest.mark.parametrize("code", [-900, -901, -1, -101])
def test_a_lookup_that_fails_is_an_error(code: int) -> None:
    client = Client()
    client.codes["a"] = code
    with pytest.raises(TierError, match=f"object a failed: {code} "):
        read(client, "ab")


def whole(client: Client, names: str) -> int:
    return read_whole(cast(MooncakeClient, client), list(names), [WHOLE] * len(names))


def test_whole_objects_count_up_to_the_first_that_is_missing() -> None:
    client = Client()
    assert whole(client, "abc") == 3
    client.codes["b"] = -704
    assert whole(client, "abc") == 1


def test_a_whole_object_of_another_length_is_an_error() -> None:
    client = Client()
    client.codes["b"] = 39
    with pytest.raises(TierError, match="object b failed: 39"):
        whole(client, "abc")


def test_whole_objects_whose_leases_run_out_are_tried_three_times() -> None:
    client = Client()
    client.codes["a"] = -707
    with pytest.raises(TierError, match="object a failed: -707 LEASE_EXPIRED"):
        whole(client, "a")
    assert client.whole == ["a"] * 3
