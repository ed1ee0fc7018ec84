from __future__ import annotations

from typing import Any, cast

import pytest

from layerstream.errors import TierError
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.ranges import Range
from layerstream.tiers.mooncake.writes import Room, SessionWriter, write_whole

WHOLE = Range(pointers=[1, 2, 3], sizes=[10] * 3, offsets=[0, 10, 20])


class Client:
    """A store: `open` has the sessions, with the bytes written in each."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.there: set[str] = set()
        self.start_codes: dict[str, int] = {}
        self.range_codes: dict[str, int] = {}
        self.end_codes: dict[str, int] = {}
        self.revoke_fails: int | TierError = 0
        self.exist_code = 0

    def start_put(self, keys: list[str], sizes: list[int]) -> list[int]:
        assert sizes == [30] * len(keys)
        codes = []
        for key in keys:
            code = self.start_codes.get(key, -705 if key in self.there else -600 if key in self.open else 0)
            if code == 0:
                self.open[key] = 0
            codes.append(code)
        return codes

    def put_range(self, key: str, _: list[int], sizes: list[int], offsets: list[int]) -> int:
        assert self.open[key] == offsets[0]
        self.open[key] += sum(sizes)
        return self.range_codes.get(key, sum(sizes))

    def end_put(self, keys: list[str]) -> list[int]:
        codes = []
        for key in keys:
            assert self.open[key] == 30, "an object was made visible before it was written"
            codes.append(self.end_codes.get(key, 0))
            if codes[-1] == 0:
                del self.open[key]
                self.there.add(key)
        return codes

    def revoke_put(self, keys: list[str]) -> list[int]:
        if isinstance(self.revoke_fails, TierError):
            raise self.revoke_fails
        if self.revoke_fails:
            return [self.revoke_fails] * len(keys)
        return [0 if self.open.pop(key, None) is not None else -600 for key in keys]

    def exist(self, keys: list[str]) -> list[int]:
        return [self.exist_code or int(key in self.there) for key in keys]

    def put_whole(self, keys: list[str], *_: Any) -> list[int]:
        codes = [self.start_codes.get(key, 0) for key in keys]
        self.there.update(key for key, code in zip(keys, codes, strict=True) if code == 0 and key not in self.open)
        return codes


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def room() -> Room:
    return Room(longest_s=10.0, clock=lambda: 0.0)


class Writer:
    def __init__(self, client: Client, room: Room) -> None:
        self._writer = SessionWriter(cast(MooncakeClient, client), ranges=1, room=room)

    def __call__(self, names: str) -> int:
        return self._writer.write(list(names), [WHOLE] * len(names))


@pytest.fixture
def write(client: Client, room: Room) -> Writer:
    return Writer(client, room)


def test_what_is_written_becomes_visible(client: Client, write: Writer) -> None:
    assert write("abc") == 3
    assert client.there == set("abc") and not client.open


def test_what_exists_is_counted_and_not_written(client: Client, write: Writer) -> None:
    client.there = {"b"}
    assert write("abc") == 3


@pytest.mark.parametrize("code", [-705, -600])
def test_what_is_being_written_is_refused_and_so_is_what_follows(client: Client, write: Writer, code: int) -> None:
    client.start_codes["b"] = code
    assert write("abc") == 1
    assert client.there == {"a"} and not client.open


def test_a_full_store_refuses_and_pauses(client: Client, write: Writer, room: Room) -> None:
    client.start_codes["a"] = -200
    assert write("ab") == 0
    assert not client.there and not client.open and not room.open


def test_a_range_that_was_not_written_exactly_revokes_its_object_and_those_after_it(
    client: Client, write: Writer
) -> None:
    client.range_codes["b"] = 9
    with pytest.raises(TierError, match="writing object b failed: 9 "):
        write("abc")
    assert client.there == {"a"} and not client.open


@pytest.mark.parametrize("code", [-900, -800, -1])
def test_memory_that_cannot_be_reserved_is_an_error_and_leaves_nothing_open(
    client: Client, write: Writer, code: int
) -> None:
    client.start_codes["b"] = code
    with pytest.raises(TierError, match=f"object b failed: {code} "):
        write("abc")
    assert not client.there and not client.open


def test_a_master_that_forgot_an_object_while_it_was_written_refuses_it(client: Client, write: Writer) -> None:
    client.end_codes["b"] = -704
    assert write("abc") == 1
    assert not client.open


def test_an_end_that_fails_is_an_error_and_leaves_nothing_open(client: Client, write: Writer) -> None:
    client.end_codes["b"] = -900
    with pytest.raises(TierError, match="ending the write of object b failed: -900"):
        write("abc")
    assert not client.open


@pytest.mark.parametrize("failure", [-900, TierError("away")])
def test_what_could_not_be_revoked_is_revoked_before_it_is_written_again(
    client: Client, write: Writer, failure: int | TierError
) -> None:
    client.range_codes["a"] = -800
    client.revoke_fails = failure
    with pytest.raises(TierError, match="-800"):
        write("a")
    assert "a" in client.open
    client.range_codes, client.revoke_fails = {}, 0
    assert write("a") == 1
    assert client.there == {"a"} and not client.open


def test_a_negative_answer_is_not_taken_for_there(client: Client, write: Writer) -> None:
    client.there, client.exist_code = {"a"}, -900
    with pytest.raises(TierError, match="-900 RPC_FAIL"):
        write("a")


def whole(client: Client, room: Room, names: str) -> int:
    return write_whole(cast(MooncakeClient, client), room, list(names), [WHOLE] * len(names))


def test_whole_objects_count_only_once_they_can_be_read(client: Client, room: Room) -> None:
    assert whole(client, room, "ab") == 2
    client.open["d"] = 0
    assert whole(client, room, "cde") == 1


def test_a_full_store_refuses_whole_objects(client: Client, room: Room) -> None:
    client.start_codes["b"] = -200
    assert whole(client, room, "abc") == 1
    assert not room.open


def test_whole_objects_that_could_not_be_written_are_an_error(client: Client, room: Room) -> None:
    client.start_codes["b"] = -800
    with pytest.raises(TierError, match="writing object b failed: -800"):
        whole(client, room, "abc")
