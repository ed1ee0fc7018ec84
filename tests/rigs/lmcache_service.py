from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import pytest

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

_shared: list[LMCacheService] = []


class LMCacheService:
    """A real `lmcache server` on loopback, engine driven, with its pool in /dev/shm. Its ports outlive restarts."""

    def __init__(self, folder: Path, *, gib: float = 0.25, options: Sequence[str] = ()) -> None:
        self.log = folder / "lmcache-server.log"
        self.port, self.http, metrics = _free_ports(3)
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.shm = f"layerstream-test-{os.getpid()}-{self.port}"
        self._environment = os.environ | {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "PYTHONPATH": str(_without_mooncake(folder)),
        }
        self._command = [
            str(Path(sys.executable).with_name("lmcache")), "server",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http), "--prometheus-port", str(metrics),
            "--supported-transfer-mode", "engine_driven", "--shm-name", self.shm,
            "--no-l1-use-lazy", "--l1-size-gb", f"{gib:g}", "--eviction-policy", "LRU", *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pool(self) -> Path:
        return Path("/dev/shm") / f"lmcache_l1_pool_{self.shm}"

    def launch(self) -> None:
        """Start it without waiting for it to serve."""
        assert self._process is None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it serves."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-4000:]
                self.stop()
                raise AssertionError(f"lmcache server did not start:\n{tail}")
            with suppress(OSError):
                self.ask("/healthcheck")
                return
            time.sleep(0.1)

    def start(self) -> None:
        self.launch()
        self.wait()

    def stop(self) -> None:
        """End it politely, then by force, and remove what a server leaves that was ended by force."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self.kill()
        for left in Path("/dev/shm").glob(f"*{self.shm}*"):
            left.unlink(missing_ok=True)

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._signal(signal.SIGSTOP)
        # The signal is on its way while the server still answers.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def objects(self) -> dict[str, int]:
        """What the server counts: objects, and what keeps them."""
        status = self.ask("/status")
        counts = status["storage_manager"]["l1_manager"]
        return {
            "there": counts["total_object_count"],
            "read_locked": counts["read_locked_count"],
            "staged": counts["staging_object_count"],
            "sessions": status["active_sessions"],
            "lookups": status["active_prefetch_jobs"],
        }

    @property
    def workers(self) -> list[int]:
        """Numbers of those that registered."""
        return list(self.ask("/status")["registered_non_cuda_instance_ids"])

    def clear(self, *, force: bool = False) -> None:
        """Drop all objects that nothing keeps, or all."""
        self.ask("/cache/clear", method="POST", body={"force": force})

    def ask(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        """Its HTTP interface."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            text = answer.read()
        with suppress(ValueError):
            return json.loads(text)
        return text

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def shared_lmcache(request: pytest.FixtureRequest) -> LMCacheService:
    """The one of 512 MiB that all tests of a run share: it takes seconds to start. Whoever ends it starts it again."""
    if not _shared:
        service = LMCacheService(request.getfixturevalue("tmp_path_factory").mktemp("lmcache"), gib=0.5)
        request.config.add_cleanup(service.stop)
        service.start()
        _shared.append(service)
    return _shared[0]


def _free_ports(count: int) -> list[int]:
    """Held together until all are known, so they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _without_mooncake(folder: Path) -> Path:
    """A folder for PYTHONPATH in which Mooncake is not installed: LMCache does without it, but not with one that is
    installed and cannot be imported, as on a machine without RDMA libraries.
    """
    hidden = folder / "without-mooncake"
    hidden.mkdir(exist_ok=True)
    (hidden / "mooncake.py").write_text('raise ModuleNotFoundError("hidden for a test", name="mooncake")\n')
    return hidden
