"""The OpenAI server with the one flag: a prompt over HTTP, vLLM's own cache cleared, the prompt again.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_TIMEOUT_S = 300.0


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read()
    return json.loads(text) if text.strip() else None


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server's address and its log."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "LayerStreamConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_gib": 0.5, "log_interval_s": 0.01},
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2),
                "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smol",
                "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
                "--kv-transfer-config", json.dumps(transfer),
            ],
            env=os.environ
            | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_prompt_over_http_comes_back_from_the_host_pool(server: tuple[str, Path]) -> None:
    url, log = server
    request = {
        "model": "smol",
        "prompt": "The ferry left at six, and nobody had counted the crates. " * 50,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 5,
    }
    cold = post(f"{url}/v1/completions", request)
    local = post(f"{url}/v1/completions", request)
    post(f"{url}/reset_prefix_cache")
    warm = post(f"{url}/v1/completions", request)
    assert warm["choices"][0]["text"] == local["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["choices"][0]["logprobs"] == local["choices"][0]["logprobs"]
    said = log.read_text()
    assert said.count("LayerStream is on: 1 rank(s) on cpu, 30 layers") == 1
    tokens = warm["usage"]["prompt_tokens"]
    hit = (tokens - 1) // 128 * 128
    assert hit > 256
    assert f"LayerStream: hit {hit}/{tokens} tokens" in said
