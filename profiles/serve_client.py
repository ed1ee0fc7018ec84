"""Sends a prompt to a vLLM server cold, then warm while its profiler runs: `python -m profiles.serve_client`.

The server must run in development mode (VLLM_SERVER_DEV_MODE=1, which lets its prefix cache be cleared) and with a
profiler configured (`--profiler-config`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from layerstream.errors import LayerStreamError

SAVE_S = 3.0
"""Saves of a request go on after its answer."""
REQUEST_S = 600.0
ORDINARY_TOKENS = range(100, 1000)
"""Ids that any vocabulary has and that are not special."""


class ServerFailed(LayerStreamError):
    """The server ended, or answered with an error."""


def post(url: str, body: dict[str, Any] | None = None) -> bytes:
    """POST `body` as JSON; returns the answer.

    Raises:
        ServerFailed: there is none, or it is an error; the message holds it.
    """
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{url} answered {error.code}: {error.read()[:500].decode(errors='replace')}") from error
    except OSError as error:
        raise ServerFailed(f"{url} cannot be reached: {error}") from error


def wait_until_ready(url: str, *, seconds: float, pid: int | None) -> None:
    """Wait until the server answers.

    Raises:
        ServerFailed: it does not in time, or process `pid` has ended.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5.0):
            return
        try:
            if pid is not None:
                os.kill(pid, 0)
        except ProcessLookupError:
            raise ServerFailed(f"the server (process {pid}) ended before it was ready") from None
        time.sleep(0.5)
    raise ServerFailed(f"{url} was not ready after {seconds:g} s; allow it more with --wait")


def serve(url: str, *, model: str, tokens: int, requests: int, save_s: float = SAVE_S) -> list[float]:
    """Serve a prompt cold, then `requests` times warm under the profiler; returns the warm requests' seconds.

    Raises:
        ServerFailed: a request failed.
    """
    prompt = random.Random(0).choices(ORDINARY_TOKENS, k=tokens)
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    # Once for what is compiled at first use, once with the connector's path.
    for _ in range(2):
        post(f"{url}/v1/completions", body)
        time.sleep(save_s)
        post(f"{url}/reset_prefix_cache")
    post(f"{url}/start_profile")
    seconds = []
    for number in range(requests):
        if number:
            post(f"{url}/reset_prefix_cache")
        begun = time.perf_counter()
        post(f"{url}/v1/completions", body)
        seconds.append(time.perf_counter() - begun)
    # The profiler may end the server together with the recording.
    with suppress(ServerFailed):
        post(f"{url}/stop_profile")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the server failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--wait", type=float, default=900.0, help="seconds until the server must be ready")
    parser.add_argument("--pid", type=int, help="process to watch meanwhile")
    options = parser.parse_args(arguments)
    url = f"http://127.0.0.1:{options.port}"
    try:
        wait_until_ready(url, seconds=options.wait, pid=options.pid)
        seconds = serve(url, model=options.model, tokens=options.tokens, requests=options.requests)
    except ServerFailed as error:
        print(f"serve_client: {error}", file=sys.stderr)
        return 1
    print("warm requests:", ", ".join(f"{each * 1e3:.1f} ms" for each in seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
