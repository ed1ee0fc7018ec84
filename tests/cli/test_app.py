from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import layerstream
from layerstream.cli import app
from layerstream.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Callable


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["layerstream", *arguments])
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Any]) -> None:
    module = types.ModuleType(name)
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"layerstream {layerstream.__version__}\n"


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "layerstream.cli", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"layerstream {layerstream.__version__}\n"


def test_an_error_raised_on_purpose_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise PoolError("no room;\n  free 2 GiB")

    put_module(monkeypatch, "layerstream.cli.doctor", run)
    assert call(monkeypatch, "doctor") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "layerstream: no room; free 2 GiB\n")


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        raise RuntimeError("a bug")

    put_module(monkeypatch, "layerstream.cli.doctor", run)
    monkeypatch.setattr(sys, "argv", ["layerstream", "doctor"])
    with pytest.raises(RuntimeError, match="a bug"):
        app.main()


@pytest.mark.parametrize("status", [0, 3])
def test_demo_passes_its_options_on_and_its_status_back(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    seen: list[dict[str, Any]] = []

    def run(**options: Any) -> int:
        seen.append(options)
        return status

    put_module(monkeypatch, "layerstream.cli.demo", run)
    assert call(monkeypatch, "demo") == status
    assert call(monkeypatch, "demo", "--out", "there", "--prompt-tokens", "512", "--pairs", "7") == status
    assert seen == [
        {"out": Path("out"), "prompt_tokens": 4000, "pairs": 6},
        {"out": Path("there"), "prompt_tokens": 512, "pairs": 7},
    ]


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "x", "--tp", "0"), ("demo", "--pairs", "0"), ("nonsense",), ("--nonsense",)]
)
def test_wrong_usage_is_status_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert call(monkeypatch, *arguments) == 2
