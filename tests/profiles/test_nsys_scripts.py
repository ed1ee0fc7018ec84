from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from profiles import serve_client
from profiles.serve_client import ServerFailed, serve, wait_until_ready

PROFILES = Path(__file__).parents[2] / "profiles"
SCRIPTS = ("nsys_mini.sh", "nsys_serve.sh")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(PROFILES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_shell_and_explain_themselves(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(PROFILES / script)], check=False, timeout=60).returncode == 0
    assert os.access(PROFILES / script, os.X_OK)
    done = run(script, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: profiles/{script}")


@pytest.mark.parametrize(("script", "arguments"), [("nsys_mini.sh", []), ("nsys_serve.sh", ["model"])])
def test_a_missing_nsys_is_named(script: str, arguments: list[str]) -> None:
    done = run(script, *arguments, NSYS="no-such-nsys")
    assert done.returncode == 2
    assert "no-such-nsys is not there; install NVIDIA Nsight Systems" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a model"),
        (["a", "b"], "two models, a and b"),
        (["--tokens"], "--tokens needs a value"),
        (["--tokens", "many", "a"], "many is not a whole number above 0"),
        (["--tp", "2", "a"], "--tp is no option"),
    ],
)
def test_wrong_usage_of_the_server_s_script_is_explained(arguments: list[str], reason: str) -> None:
    done = run("nsys_serve.sh", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_the_example_is_recorded_exported_and_reported(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    nsys = program(tmp_path / "nsys", f'echo "nsys $*" >>{calls}')
    python = program(tmp_path / "python", f'echo "python $*" >>{calls}')
    output = tmp_path / "new" / "name"
    done = run("nsys_mini.sh", "-o", str(output), "--layers", "2", NSYS=str(nsys), PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    recorded, exported, reported = calls.read_text().splitlines()
    assert recorded.startswith("nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node ")
    assert recorded.endswith(f"--output={output} {python} {PROFILES.parent}/examples/mini_engine.py --layers 2")
    assert exported == f"nsys export --type=sqlite --force-overwrite=true --output={output}.sqlite {output}.nsys-rep"
    assert reported == f"python -m profiles.overlap {output}.sqlite"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, '{"load_mode":"layerwise","recompute":"never"}'),
        ({"LAYERSTREAM_OPTIONS": '{"host_gib": 2}'}, '{"host_gib": 2}'),
    ],
)
def test_the_server_is_recorded_exported_and_reported(tmp_path: Path, given: dict[str, str], used: str) -> None:
    calls = tmp_path / "calls"
    output = tmp_path / "name"
    nsys = program(
        tmp_path / "nsys",
        f'echo "nsys $*" >>{calls}; case $1 in profile) echo made >{output}.nsys-rep; sleep 1 ;; esac',
    )
    python = program(tmp_path / "python", f'echo "python $*" >>{calls}')
    options = {"NSYS": str(nsys), "PYTHON": str(python), **given}
    done = run("nsys_serve.sh", "-o", str(output), "-t", "99", "model", "--", "--enforce-eager", **options)
    assert done.returncode == 0, done.stderr
    found = calls.read_text().splitlines()
    recorded = next(line for line in found if line.startswith("nsys profile"))
    assert "--capture-range=cudaProfilerApi" in recorded
    assert "--cuda-graph-trace=node" in recorded
    assert f"{python} -m vllm.entrypoints.openai.api_server --model model --port 8765" in recorded
    assert f'"kv_connector_extra_config":{used}}}' in recorded
    assert recorded.endswith("--enforce-eager")
    assert any(
        line.startswith("python -m profiles.serve_client --port 8765 --model model --tokens 99") for line in found
    )
    assert found[-1] == f"python -m profiles.overlap {output}.sqlite"


def test_requests_that_fail_end_the_recording(tmp_path: Path) -> None:
    nsys = program(tmp_path / "nsys", f"echo $$ >{tmp_path}/pid; exec sleep 50")
    python = program(tmp_path / "python", f"until [ -s {tmp_path}/pid ]; do sleep 0.02; done; exit 1")
    done = run("nsys_serve.sh", "-o", str(tmp_path / "name"), "model", NSYS=str(nsys), PYTHON=str(python))
    assert done.returncode == 2
    assert f"the requests failed; the server's log is {tmp_path}/name.log" in done.stderr
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid: int, hang_s: float = 20.0) -> bool:
    """Whether a process of another parent ends in time; one that nobody has waited for yet has ended."""
    stat_file, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + hang_s
    while time.monotonic() < deadline:
        try:
            if stat_file.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


class Server(ThreadingHTTPServer):
    """Notes what it is asked, and refuses one path."""

    asked: list[tuple[str, object]]
    refused = ""


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            listening.asked.append((self.path, json.loads(body) if body else None))
            self.send_response(500 if self.path == listening.refused else 200)
            self.end_headers()
            self.wfile.write(b"an answer")

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    listening = Server(("127.0.0.1", 0), Handler)
    listening.asked = []
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    yield listening
    listening.shutdown()
    thread.join()
    listening.server_close()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_only_warm_requests_are_recorded(server: Server) -> None:
    wait_until_ready(url_of(server), seconds=10, pid=None)
    seconds = serve(url_of(server), model="m", tokens=50, requests=2, save_s=0.0)
    assert len(seconds) == 2
    serve_one, clear = "/v1/completions", "/reset_prefix_cache"
    assert [path for path, _ in server.asked] == [
        *(serve_one, clear, serve_one, clear),
        *("/start_profile", serve_one, clear, serve_one, "/stop_profile"),
    ]
    bodies = [body for path, body in server.asked if path == serve_one]
    assert all(body == bodies[0] for body in bodies)
    assert isinstance(bodies[0], dict)
    assert len(bodies[0]["prompt"]) == 50


def test_an_error_of_the_server_is_shown(server: Server) -> None:
    server.refused = "/start_profile"
    with pytest.raises(ServerFailed, match=r"/start_profile answered 500: an answer"):
        serve(url_of(server), model="m", tokens=5, requests=1, save_s=0.0)


def test_a_server_that_ends_with_the_recording_is_no_failure(server: Server) -> None:
    server.refused = "/stop_profile"
    assert len(serve(url_of(server), model="m", tokens=5, requests=1, save_s=0.0)) == 1


def test_a_server_that_ended_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    options = ["--port", "1", "--model", "m", "--wait", "50", "--pid", str(ended.pid)]
    assert serve_client.main(options) == 1
    assert f"the server (process {ended.pid}) ended before it was ready" in capsys.readouterr().err


def test_a_server_that_is_never_ready_is_given_up() -> None:
    with pytest.raises(ServerFailed, match=r"was not ready after 0.2 s; allow it more with --wait"):
        wait_until_ready("http://127.0.0.1:1", seconds=0.2, pid=None)
