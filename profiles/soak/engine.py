"""vLLM's asynchronous engine in a process of its own, as a server runs it: requests come and go at any time.

The parent writes one request a line and gets one answer a line, both JSON. What the engine prints comes to the parent
through a pipe, line by line, so that a limit on the size of files, set from outside, meets the disk tier alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

START_S = 240.0
STOP_S = 40.0
LONGEST_LINE = 1 << 22


class EngineEndedError(Exception):
    """The engine's process has ended, and the answer will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    prompt: Sequence[int]
    salt: str | None = None
    """Cache salt."""
    tokens: int = 1
    logprobs: int = 10
    abort_after_s: float | None = None
    """Seconds after which it is aborted, if it has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of it."""

    token_ids: list[int]
    logprobs: list[dict[str, float]]
    """For each token, token id -> logprob of the likeliest ones."""
    cached_tokens: int
    ttft_s: float
    """Until the first token, as the client sees it."""
    aborted: bool = False
    failed: str = ""
    """Why the engine failed the request; empty if it did not."""


class EngineLife:
    """From a start to an end.

    Args:
        model: a model's folder.
        options: the connector's `kv_connector_extra_config`; None starts the engine without a connector.
        arguments: of vLLM's engine.
        printed: called with each line that the engine prints, in a thread.
        unchecked: whether what comes from tiers is taken for right without looking.
    """

    def __init__(
        self,
        model: Path,
        *,
        options: Mapping[str, Any] | None,
        arguments: Mapping[str, Any],
        printed: Callable[[str], None],
        unchecked: bool = False,
    ) -> None:
        setup = {"model": str(model), "options": options, "arguments": dict(arguments), "unchecked": unchecked}
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "profiles.soak.engine", json.dumps(setup), str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        os.close(writing)
        self.pid = self._process.pid
        """Of its first process, whose session has all of them."""
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Reply]] = {}
        self._asked = 0
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._take_answers, args=(reading,), daemon=True),
            threading.Thread(target=self._take_lines, args=(printed,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        """Whether its first process has ended."""
        return self._ended.is_set()

    def wait_ready(self) -> None:
        """Until it serves.

        Raises:
            EngineEndedError: it ended, or takes too long.
        """
        deadline = time.monotonic() + START_S
        while not self._ready.wait(0.1):
            if self.ended or time.monotonic() > deadline:
                self.kill()
                raise EngineEndedError("the engine did not start")

    def ask(self, ask: Ask) -> Future[Reply]:
        """Send a request. Its answer is an `EngineEndedError` if the process ends first."""
        future: Future[Reply] = Future()
        with self._lock:
            self._asked += 1
            name = f"r{self._asked}"
            self._futures[name] = future
        try:
            assert self._process.stdin is not None
            line = json.dumps({"name": name, **asdict(ask)}).encode() + b"\n"
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            self._fail_all()
        if self.ended:
            self._fail_all()
        return future

    def close(self) -> float:
        """Let it shut down, as SIGINT to a server does; the seconds that it took.

        Raises:
            TimeoutError: it took too long, and was killed.
        """
        begun = time.monotonic()
        with self._lock, suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the engine has not shut down within {STOP_S:g} s") from None
        finally:
            self.kill()
        return time.monotonic() - begun

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(10)

    def _take_answers(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as answers:
            for line in answers:
                answer = json.loads(line)
                if answer == "ready":
                    self._ready.set()
                    continue
                with self._lock:
                    future = self._futures.pop(answer.pop("name"))
                future.set_result(Reply(**answer))
        self._ended.set()
        self._fail_all()

    def _take_lines(self, printed: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            printed(line.decode(errors="replace").rstrip("\n"))

    def _fail_all(self) -> None:
        with self._lock:
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(EngineEndedError("the engine ended"))


async def _live(setup: Mapping[str, Any], answers: int) -> None:
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # The CPU build keeps a kernel for each length of step that it has seen, hundreds of MiB of them, with any connector
    # or none.
    os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4", "LRU_CACHE_CAPACITY": "4"}
    # Functions that are compiled when first used need files that grow, which is one of the faults.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[0]))
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = {"kv_connector": "LayerStreamConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = setup["options"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=setup["model"],
            kv_transfer_config=None if setup["options"] is None else transfer,
            skip_tokenizer_init=True,
            worker_extension_cls="profiles.soak.unchecked.Unchecked" if setup["unchecked"] else "",
            **setup["arguments"],
        )
    )

    def say(value: Any) -> None:
        os.write(answers, json.dumps(value).encode() + b"\n")

    async def serve(name: str, prompt: list[int], salt: str | None, tokens: int, logprobs: int) -> dict[str, Any]:
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        begun, ttft, last = time.monotonic(), 0.0, None
        asked: Any = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        async for output in engine.generate(asked, params, request_id=name):
            ttft, last = ttft or time.monotonic() - begun, output
        assert last is not None
        answer = last.outputs[0]
        return {
            "token_ids": list(answer.token_ids),
            "logprobs": [
                {str(token): found.logprob for token, found in step.items()} for step in answer.logprobs or ()
            ],
            "cached_tokens": last.num_cached_tokens or 0,
            "ttft_s": ttft,
            "failed": "" if len(answer.token_ids) == tokens else f"it ended as {answer.finish_reason}",
        }

    async def answer(ask: dict[str, Any]) -> None:
        name, within = ask["name"], ask.pop("abort_after_s")
        empty = {"token_ids": [], "logprobs": [], "cached_tokens": 0, "ttft_s": 0.0}
        try:
            async with asyncio.timeout(within):
                served = await serve(**ask)
        except TimeoutError:
            served = empty | {"aborted": True}
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has failed
            served = empty | {"failed": repr(error)}
        say({"name": name} | served)

    lines = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say("ready")
    tasks: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    engine.shutdown(timeout=STOP_S / 2)


if __name__ == "__main__":
    asyncio.run(_live(json.loads(sys.argv[1]), int(sys.argv[2])))
