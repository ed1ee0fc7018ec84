"""A real Mooncake Store on loopback: `mooncake_master`, and owners of memory, each a process that a test can end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from layerstream.tiers.mooncake.library import limits
from layerstream.tiers.mooncake.master import MasterAddress
from layerstream.tiers.mooncake.tier import MooncakeTier

TIMEOUT_S = 2.0
"""Option `timeout_s` of the tests' tiers. The library has one time limit for the whole process, and the first tier of
it sets it, which may be one of another test: so it is set here, before there is any."""
os.environ.update(limits(TIMEOUT_S))

START_TIMEOUT_S = 30.0
HOST = "127.0.0.1"


def until(condition: Callable[[], bool], *, seconds: float = START_TIMEOUT_S, what: str = "it") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came true"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


class Process:
    """A service in a process group of its own, with a log."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.log = log
        command = [str(Path(sys.executable).with_name(name)), *arguments]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def hang(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        until(lambda: all(") T " in (task / "stat").read_text() for task in tasks.iterdir()), what="the hang")

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """At once, hanging or not."""
        if not self.ended:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)


class MooncakeService:
    """A master and one owner, unless `owner_mib` is 0.

    Args:
        logs: folder for their logs, which are named where something does not start.
        owner_mib: memory of the owner.
        lease_ms: how long the master protects what was found.
        master_options: more of its flags.
    """

    def __init__(self, logs: Path, *, owner_mib: int = 512, lease_ms: int = 10_000, **master_options: object) -> None:
        self.logs, self.owner_mib, self.lease_ms = logs, owner_mib, lease_ms
        self._options = master_options
        self.port = free_port()
        self.master = self._start_master()
        self.owners: list[Process] = []
        try:
            if owner_mib:
                self.add_owner()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def owner(self) -> Process:
        return self.owners[-1]

    def tier(self, **options: Any) -> MooncakeTier:
        given = {"master": self.address, "timeout_s": TIMEOUT_S, "lease_s": self.lease_ms / 1000}
        return MooncakeTier.parse(given | options)

    def add_owner(self, *, mib: int = 0, wait: bool = True) -> Process:
        before = self.capacity_bytes() if wait else 0
        owner = Process(
            "mooncake_client",
            [
                f"--master_server_address={self.address}", f"--host={HOST}", f"--port={free_port()}",
                "--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--global_segment_size={mib or self.owner_mib}MB",
            ],
            self.logs / "mooncake-owner.log",
        )  # fmt: skip
        self.owners.append(owner)
        if wait:
            self._await(owner, lambda: self.capacity_bytes() > before)
        return owner

    def restart_master(self) -> None:
        """Another one at the same address."""
        self.master.kill()
        self.master = self._start_master()

    def capacity_bytes(self) -> int:
        """Memory that the master knows of."""
        return self._metric("master_total_capacity_bytes")

    def used_bytes(self) -> int:
        return self._metric("master_allocated_bytes")

    def stop(self) -> None:
        for process in (*self.owners, self.master):
            process.kill()

    def _start_master(self) -> Process:
        self._metrics_port = free_port()
        flags = {
            "rpc_address": HOST, "rpc_port": self.port, "metrics_host": HOST, "metrics_port": self._metrics_port,
            "default_kv_lease_ttl": self.lease_ms, **self._options,
        }  # fmt: skip
        log = self.logs / "mooncake-master.log"
        master = Process("mooncake_master", [f"--{name}={value}" for name, value in flags.items()], log)
        try:
            self._await(master, MasterAddress(HOST, self.port).answers)
            self._await(master, lambda: self.capacity_bytes() >= 0)
        except BaseException:
            master.kill()
            raise
        return master

    @staticmethod
    def _await(process: Process, condition: Callable[[], bool]) -> None:
        def ready() -> bool:
            assert not process.ended, f"it ended at once; see {process.log}"
            return condition()

        until(ready, what=f"start of the service with the log {process.log}")

    def _metric(self, name: str) -> int:
        """-1 while the master does not answer."""
        with suppress(OSError), socket.create_connection((HOST, self._metrics_port), 2) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            connection.settimeout(2)
            text = b""
            while block := connection.recv(1 << 16):
                text += block
                if b"\n" + name.encode() + b" " in text and text.endswith(b"\n"):
                    break
            for line in text.decode(errors="replace").splitlines():
                if line.startswith(name + " "):
                    return int(float(line.split()[1]))
        return -1


@contextmanager
def mooncake_service(logs: Path, **options: Any) -> Iterator[MooncakeService]:
    service = MooncakeService(logs, **options)
    try:
        yield service
    finally:
        service.stop()
