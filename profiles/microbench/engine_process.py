"""One vLLM engine in a process of its own that serves requests when told to, so that several can take turns.

The process talks over an inherited pipe and writes what vLLM prints to a log file. Everything it starts belongs to its
process group, which is ended with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, Self

from layerstream.hooks.vllm.local_engine import Answer

ROOT = Path(__file__).resolve().parents[2]

START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 3000


class EngineFailed(RuntimeError):
    """An engine or a server did not start, did not answer or raised. `reason` is one line; the message adds its log."""

    def __init__(self, reason: str, log: Path) -> None:
        self.reason = reason
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        super().__init__(f"{reason}\n--- end of {log}:\n{tail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How an engine is started: see `LocalEngine`. Whatever is compared differs in the connector alone."""

    model: str
    max_model_len: int
    connector: str | None = None
    """Name of the KV connector; None for none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its `kv_connector_extra_config`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables its process needs."""


class EngineProcess:
    """Starts an engine, and ends it on leaving the `with` block."""

    def __init__(self, name: str, spec: EngineSpec, logs: Path) -> None:
        """
        Args:
            name: names the log file.
            spec: what to start.
            logs: folder for its log.

        Raises:
            EngineFailed: it did not start.
        """
        self.name = name
        self.log = logs / f"{name}.log"
        self._pipe, theirs = Pipe()
        module = "profiles.microbench.engine_server"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), json.dumps(asdict(spec))],
                cwd=ROOT,
                env=os.environ | spec.environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # With this end closed here, reading fails at once when the process dies.
        theirs.close()
        try:
            self.setup: dict[str, str] = self._receive(START_TIMEOUT_S)
            """What it computes in, and on which core."""
        except EngineFailed:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Leader of the process group that everything of this engine belongs to."""
        return self._process.pid

    def serve(self, prompt: Sequence[int], *, tokens: int = 1, logprobs: int | None = None) -> Answer:
        """See `LocalEngine.serve`.

        Raises:
            EngineFailed: the engine raised, died or did not answer in time.
        """
        answer: Answer = self._call("serve", prompt=list(prompt), tokens=tokens, logprobs=logprobs)
        return answer

    def forget(self) -> None:
        """Clear vLLM's own prefix cache, not the connector's.

        Raises:
            EngineFailed: blocks stayed in use, or the engine did not answer.
        """
        self._call("forget")

    def stop(self) -> None:
        """End the engine: politely, then by force."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._pipe.send(("stop", {}))
            self._process.wait(STOP_TIMEOUT_S)
        self._pipe.close()
        end_group(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, command: str, **arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        return self._receive(CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise self._failure(f"did not answer for {timeout_s:g} s")
            done, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._failure("ended unexpectedly") from error
        if not done:
            raise self._failure(f"raised {value}")
        return value

    def _failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"engine {self.name!r} {what}", self.log)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process started in a session of its own, and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
