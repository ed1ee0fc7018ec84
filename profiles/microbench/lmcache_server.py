"""LMCache's multiprocess server on loopback, with its data plane in shared memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from profiles.microbench.engine_process import EngineFailed, end_group

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


class LMCacheServer:
    """Starts a server, and ends it on leaving the `with` block."""

    def __init__(self, logs: Path, *, gib: float) -> None:
        """
        Args:
            logs: folder for its log.
            gib: size of its pool in /dev/shm, made resident at start.

        Raises:
            EngineFailed: it did not start.
        """
        self.log = logs / "lmcache-server.log"
        self.port, http, metrics = _free_ports(3)
        self.environment = {"LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(_without_mooncake(logs))}
        """What the server's process needs, and that of an engine that uses it."""
        self._shm = f"layerstream-bench-{os.getpid()}"
        command = [
            str(Path(sys.executable).with_name("lmcache")), "server", "--quiet",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(http), "--prometheus-port", str(metrics),
            "--shm-name", self._shm, "--no-l1-use-lazy", "--l1-size-gb", f"{gib:g}", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "engine_driven",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | self.environment | {"LMCACHE_DISABLE_BANNER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await(f"http://127.0.0.1:{http}/healthcheck")
        except EngineFailed:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Leader of its process group."""
        return self._process.pid

    @property
    def connector_options(self) -> dict[str, Any]:
        """`kv_connector_extra_config` of an engine that uses it."""
        return {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.mp_transfer_mode": "engine_driven",
        }

    def stop(self) -> None:
        """End it: politely, then by force."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        end_group(self._process)
        # A server ended by force leaves its pool behind.
        for left in Path("/dev/shm").glob(f"*{self._shm}*"):
            left.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await(self, url: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            if self._process.poll() is not None:
                raise EngineFailed(f"lmcache server ended with status {self._process.returncode}", self.log)
            try:
                with opener.open(url, timeout=2):
                    return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    raise EngineFailed(f"lmcache server is not up: {error}", self.log) from error
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """Loopback ports that the system says are free. Held together until all are known, so they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _without_mooncake(folder: Path) -> Path:
    """A folder for PYTHONPATH in which Mooncake is not installed.

    LMCache does without it, but not with one that is installed and cannot be imported, as on a machine without RDMA
    libraries. Nothing that is measured uses it.
    """
    hidden = folder / "without-mooncake"
    hidden.mkdir(exist_ok=True)
    (hidden / "mooncake.py").write_text('raise ModuleNotFoundError("hidden for a benchmark", name="mooncake")\n')
    return hidden
