"""vLLM's OpenAI server with the connector, over a model without a tokenizer: prompts are token ids.

It is what `vllm serve` runs; the command itself asks for a distribution named `vllm`, which the CPU build is not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

START_S = 300.0
ANSWER_S = 120.0
STOP_S = 60.0


class HttpServer:
    """From a start to an end. A context manager."""

    def __init__(self, model: Path, log: Path, *, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> None:
        """
        Args:
            model: a model's folder.
            log: file that gets all that the server prints.
            options: of the connector.
            arguments: further ones of the command line.
        """
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        transfer = {
            "kv_connector": "LayerStreamConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(options),
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                    "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny",
                    "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
                    "--kv-transfer-config", json.dumps(transfer), *arguments,
                ],
                env=os.environ
                | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-3000:]
                self.close()
                raise AssertionError(said)
            time.sleep(0.2)

    def complete(self, ids: Sequence[int], *, tokens: int = 1) -> None:
        """Serve one prompt to its end, greedily."""
        self.post("/v1/completions", {
            "model": "tiny", "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "detokenize": False,
        })  # fmt: skip

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(dict(body or {})).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return str(reply.read(), "utf-8")

    def scrape(self) -> str:
        """What Prometheus gets."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as reply:
            return str(reply.read(), "utf-8")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True
