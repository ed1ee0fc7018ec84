from __future__ import annotations

import importlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.mooncake import connection as mooncake_connection
from layerstream.tiers.mooncake import library as mooncake_library
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.codes import meaning
from layerstream.tiers.mooncake.connection import ConnectionSettings, MooncakeConnection
from layerstream.tiers.mooncake.library import limits, load_library, ranges_per_call
from layerstream.tiers.mooncake.master import MasterAddress
from tests.rigs.fake_pinning import until


@dataclass(frozen=True)
class FakeMaster(MasterAddress):
    host: str = "127.0.0.1"
    port: int = 1
    alive: list[bool] = None  # type: ignore[assignment]

    def answers(self) -> bool:
        return self.alive[0]

    def local_address(self) -> str:
        return "127.0.0.1"


class Library:
    """Stands in for `mooncake.store`. Its object asserts what the real one crashes on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.setup_code = 0
        self.register_code = 0
        self.answer: Callable[[str, list[str]], Any] = lambda _, keys: [0] * len(keys)
        self.stores: list[Any] = []

    def ReplicateConfig(self) -> Any:  # noqa: N802 - the library's name
        return SimpleNamespace(preferred_segment="")

    def MooncakeDistributedStore(self) -> Any:  # noqa: N802 - the library's name
        library = self

        class Store:
            usable = False

            def setup(self, *arguments: Any) -> int:
                library.log.append("setup")
                library.arguments = arguments
                self.usable = library.setup_code == 0
                return library.setup_code

            def __getattr__(self, name: str) -> Any:
                assert self.usable, f"{name} crashes the process here"

                def call(*arguments: Any) -> Any:
                    assert self.usable, f"{name} crashes the process here"
                    library.log.append(name)
                    if name in {"register_buffer", "unregister_buffer"}:
                        return library.register_code if name == "register_buffer" else 0
                    if name == "get_hostname":
                        return "127.0.0.1:12345"
                    if name == "close":
                        self.usable = False
                        return 0
                    answer = library.answer(name, arguments[0])
                    assert self.usable, f"closed while {name} was under way"
                    return answer

                return call

        self.stores.append(Store())
        return self.stores[-1]

    arguments: tuple[Any, ...] = ()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self, *, alive: bool = True, memory: tuple[Any, ...] = (), **options: Any) -> None:
        settings: dict[str, Any] = {"timeout_s": 0.2} | options
        self.alive, self.library, self.clock = [alive], Library(), Clock()
        master = FakeMaster(alive=self.alive)
        self.connection = MooncakeConnection(
            self.library, ConnectionSettings(master=master, **settings), memory=memory, clock=self.clock
        )
        self.client = MooncakeClient(self.connection, clock=self.clock)

    @property
    def log(self) -> list[str]:
        return self.library.log


@pytest.fixture(autouse=True)
def _nothing_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_connection, "left_open", [])


def test_the_library_is_not_touched_before_the_master_answers() -> None:
    rig = Rig(alive=False)
    rig.client.open()
    with pytest.raises(TierError, match=r"no master answers|not connected"):
        rig.client.exist(["a"])
    rig.client.end_get(["a"])
    rig.client.close()
    assert rig.log == []


def test_a_call_connects_once_the_master_answers() -> None:
    rig = Rig(alive=False)
    rig.client.open()
    rig.alive[0] = True
    with pytest.raises(TierError, match="waiting to try again"):
        rig.client.exist(["a"])
    rig.clock.now = 1.0
    assert rig.client.exist(["a", "b"]) == [0, 0]
    assert rig.log == ["setup", "batch_is_exist"]


def test_attempts_to_connect_get_rarer_and_stay_a_few_seconds_apart() -> None:
    rig = Rig(alive=True)
    rig.library.setup_code = -600
    attempts = []
    for tenth in range(300):
        rig.clock.now = tenth / 10
        before = len(rig.log)
        with pytest.raises(TierError):
            rig.client.exist(["a"])
        if len(rig.log) > before:
            attempts.append(rig.clock.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert gaps[:3] == [1.0, 2.0, 4.0] and set(gaps[3:]) == {5.0}


def test_a_refused_setup_leaves_an_object_that_nobody_calls() -> None:
    rig = Rig()
    rig.library.setup_code = -600
    with pytest.raises(TierError, match="-600 INVALID_PARAMS"):
        rig.client.exist(["a"])
    rig.client.close()
    assert rig.log == ["setup"]


def test_nothing_is_called_after_close() -> None:
    rig = Rig()
    rig.client.open()
    rig.client.close()
    rig.client.close()
    with pytest.raises(TierError, match="not connected"):
        rig.client.exist(["a"])
    with pytest.raises(TierError, match="not connected"):
        rig.client.put_range("a", [1], [1], [0])
    rig.client.end_get(["a"])
    rig.client.open()
    assert rig.log == ["setup", "close"]


@contextmanager
def a_call_under_way(rig: Rig) -> Iterator[threading.Event]:
    entered, leave = threading.Event(), threading.Event()

    def wait(_: str, keys: list[str]) -> list[int]:
        entered.set()
        assert leave.wait(20)
        return [0] * len(keys)

    rig.library.answer = wait
    thread = threading.Thread(target=rig.client.exist, args=(["a"],))
    thread.start()
    assert entered.wait(20)
    try:
        yield leave
    finally:
        leave.set()
        thread.join(20)
        assert not thread.is_alive()


def test_closing_waits_for_the_calls_under_way() -> None:
    rig = Rig(timeout_s=20.0)
    rig.client.open()
    with a_call_under_way(rig) as leave:
        closing = threading.Thread(target=rig.client.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive() and "close" not in rig.log
        leave.set()
        closing.join(20)
    assert rig.log[-1] == "close"


def test_a_call_that_outlasts_closing_closes_when_it_ends() -> None:
    rig = Rig()
    rig.client.open()
    with a_call_under_way(rig):
        rig.client.close()
        assert "close" not in rig.log
    assert rig.log.count("close") == 1


def test_a_client_that_connects_while_it_is_closed_is_closed() -> None:
    rig = Rig()
    inside, leave = threading.Event(), threading.Event()
    object_of = rig.library.MooncakeDistributedStore

    def slow() -> Any:
        inside.set()
        assert leave.wait(20)
        return object_of()

    rig.library.MooncakeDistributedStore = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=rig.client.open)
    thread.start()
    assert inside.wait(20)
    rig.client.close()
    leave.set()
    thread.join(20)
    assert rig.log == ["setup", "close"]


def test_a_master_that_was_restarted_is_asked_again() -> None:
    rig = Rig()
    answers = [[-900], [1]]
    rig.library.answer = lambda *_: answers.pop(0)
    assert rig.client.exist(["a"]) == [1]
    answers = [[-900], [-900], [1]]
    assert rig.client.exist(["a"]) == [-900]


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_that_failed_is_asked_for_a_sign_of_life_before_anything_else(code: int) -> None:
    rig = Rig()
    rig.library.answer = lambda _, keys: [code] * len(keys)
    assert rig.client.exist(["a"]) == [code]
    rig.alive[0] = False
    calls = len(rig.log)
    with pytest.raises(TierError, match="does not answer"):
        rig.client.exist(["a"])
    assert len(rig.log) == calls
    rig.alive[0] = True
    rig.library.answer = lambda _, keys: [1] * len(keys)
    assert rig.client.exist(["a"]) == [1]
    rig.alive[0] = False
    assert rig.client.exist(["a"]) == [1]


def test_ranges_go_to_owners_while_the_master_is_away() -> None:
    rig = Rig()
    rig.library.answer = lambda name, keys: [-900 if name == "batch_is_exist" else 5] * len(keys)
    rig.client.exist(["a"])
    rig.alive[0] = False
    assert rig.client.get_range("a", [1], [5], [0]) == 5
    with pytest.raises(TierError, match="does not answer"):
        rig.client.start_get(["a"])


@pytest.mark.parametrize("answer", [[], [0], [0, 0, 0]])
def test_another_number_of_answers_than_keys_is_an_error(answer: list[int]) -> None:
    rig = Rig()
    rig.library.answer = lambda *_: answer
    with pytest.raises(TierError, match="answers for 2 keys"):
        rig.client.exist(["a", "b"])


def test_no_keys_are_no_question() -> None:
    rig = Rig(alive=False)
    assert rig.client.exist([]) == []


def test_memory_is_registered_while_connected() -> None:
    rig = Rig(memory=(np.zeros(10, np.uint8), np.zeros(20, np.uint8)))
    rig.client.open()
    rig.client.close()
    assert rig.log == ["setup", "register_buffer", "register_buffer", "unregister_buffer", "unregister_buffer", "close"]


def test_memory_that_cannot_be_registered_is_told_when_the_engine_starts() -> None:
    rig = Rig(memory=(np.zeros(10, np.uint8),), protocol="rdma")
    rig.library.register_code = -600
    with pytest.raises(ConfigError, match=r"register 10 bytes of host memory for rdma.*ulimit -l"):
        rig.client.open()
    assert rig.log[-1] == "close"
    rig.clock.now = 10.0
    with pytest.raises(TierError, match="register 10 bytes"):
        rig.client.exist(["a"])


def test_contributed_memory_is_preferred_for_what_is_written_here() -> None:
    rig = Rig(segment_bytes=1 << 30)
    placed: list[str] = []

    def start(_: list[str], __: list[int], placement: Any) -> list[int]:
        placed.append(placement.preferred_segment)
        return [0]

    rig.client.open()
    rig.library.stores[0].batch_put_session_start = start
    rig.client.start_put(["a"], [1])
    assert rig.library.arguments[2] == 1 << 30 and placed == ["127.0.0.1:12345"]


def test_an_owner_is_not_closed_while_the_master_is_dead() -> None:
    rig = Rig(segment_bytes=1 << 30, memory=(np.zeros(10, np.uint8),))
    rig.client.open()
    rig.alive[0] = False
    rig.client.close()
    assert rig.log[-1] == "unregister_buffer" and mooncake_connection.left_open == [rig.library.stores[0]]


def test_a_client_without_memory_is_closed_even_if_the_master_is_dead() -> None:
    rig = Rig()
    rig.client.open()
    rig.alive[0] = False
    rig.client.close()
    assert rig.log[-1] == "close" and not mooncake_connection.left_open


@pytest.mark.parametrize(
    ("protocol", "seconds", "parts"), [("tcp", 5.0, False), ("tcp", 60.0, True), ("rdma", 0.1, True)]
)
def test_a_transfer_that_may_not_have_stopped_ends_the_connection(protocol: str, seconds: float, parts: bool) -> None:
    rig = Rig(protocol=protocol)
    rig.client.open()

    def fail(_: str, keys: list[str]) -> list[int]:
        rig.clock.now += seconds
        return [-800] * len(keys)

    rig.library.answer = fail
    assert rig.client.get_range("a", [1], [5], [0]) == -800
    assert (rig.log[-1] == "close") == parts
    rig.library.answer = lambda _, keys: [5] * len(keys)
    assert rig.client.get_range("a", [1], [5], [0]) == 5
    assert rig.log.count("setup") == 1 + parts


def test_codes_say_number_name_and_meaning() -> None:
    assert meaning(-901).startswith("-901 RPC_TIMEOUT (the master took longer")
    assert meaning(-12345).startswith("-12345 ")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:50051", "10.0.0.1", 50051), ("kv-master:1", "kv-master", 1), ("[::1]:65535", "::1", 65535)],
)
def test_a_masters_address_is_read_and_told(text: str, host: str, port: int) -> None:
    address = MasterAddress.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:5", "http://h:1", "h:1/x"])
def test_what_is_no_masters_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port"):
        MasterAddress.parse(text)


def _listening(serve: Callable[[socket.socket], None] | None) -> tuple[socket.socket, MasterAddress]:
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        with connection:
            assert serve is not None
            serve(connection)

    if serve:
        threading.Thread(target=run, daemon=True).start()
    return listening, MasterAddress(*listening.getsockname())


def test_an_answer_and_a_closed_connection_are_signs_of_life() -> None:
    for serve in (lambda peer: peer.sendall(b"?"), lambda peer: peer.recv(64)):
        listening, address = _listening(serve)
        with listening:
            assert address.answers()


def test_a_master_that_accepts_and_says_nothing_gives_no_sign_of_life() -> None:
    listening, address = _listening(None)
    with listening:
        started = time.monotonic()
        assert not address.answers()
        assert time.monotonic() - started < 20


def test_nobody_listening_is_no_sign_of_life() -> None:
    listening, address = _listening(None)
    listening.close()
    assert not address.answers()


def test_this_machines_address_is_that_of_the_way_to_the_master() -> None:
    assert MasterAddress("127.0.0.1", 50051).local_address() == "127.0.0.1"
    assert MasterAddress("localhost", 50051).local_address() in {"127.0.0.1", "::1"}


def test_limits_follow_the_time_limit_and_stay_below_the_librarys_own() -> None:
    for timeout_s in (1.0, 2.5, 30.0):
        values = limits(timeout_s)
        assert int(values["MC_RPC_TIMEOUT_MS"]) == timeout_s * 1000
        assert timeout_s / 2 <= int(values["MC_TCP_PROGRESS_TIMEOUT_SEC"]) < mooncake_library.LONGEST_TRANSFER_S


@pytest.mark.usefixtures("_environment")
def test_as_many_ranges_go_into_a_call_as_may_all_be_stopped_before_it_is_given_up() -> None:
    for progress, status, ranges in (("1", "1", 59), ("3", "2", 19), ("2", "5", 11), ("59", "1", 1)):
        os.environ.update(MC_TCP_PROGRESS_TIMEOUT_SEC=progress, MC_TCP_STATUS_TIMEOUT_SEC=status)
        assert ranges_per_call() == ranges


@pytest.fixture
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_environment")
def test_limits_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    monkeypatch.delenv("MC_TCP_STATUS_TIMEOUT_SEC", raising=False)
    load_library(7.0)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "1234"
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "4"


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("value", ["60", "0", "soon", ""])
def test_limits_that_outlast_the_librarys_own_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", value)
    with pytest.raises(ConfigError, match=r"MC_TCP_PROGRESS_TIMEOUT_SEC is .*allowed: whole seconds from 1 to 59"):
        load_library(5.0)


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_library, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'layerstream\[mooncake\]'"):
        load_library(5.0)


@pytest.mark.usefixtures("_environment")
def test_a_missing_system_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError, match="apt-get install libibverbs1"):
        load_library(5.0)


def test_importing_the_tier_does_not_import_mooncake() -> None:
    import subprocess

    code = "import sys, layerstream.tiers.mooncake; assert not any(name.startswith('mooncake') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_threads_connect_once() -> None:
    rig = Rig()
    threads = [threading.Thread(target=rig.client.exist, args=(["a"],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    until(lambda: rig.log.count("batch_is_exist") == 8)
    assert rig.log.count("setup") == 1
