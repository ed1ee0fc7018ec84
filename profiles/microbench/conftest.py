"""The run as a whole: its options, where its rows are collected, and the table at its end."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from layerstream.model_store import MODEL_NAME, prepare_model, tiny_model
from layerstream.trials import MAX_PAIRS
from profiles.microbench.engine_process import ROOT
from profiles.microbench.machine import commit, describe_machine, versions
from profiles.microbench.results import SECTIONS, Results, Section
from profiles.microbench.turns import PROMPT_TOKENS, Prompts

TINY = "tiny"

# Services are started as the tests start them (`tests.rigs`). `tests` is not installed, and others' packages are called
# so too, so it is made to mean the checkout's before a module asks for it.
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(ROOT / "tests")]

_RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("layerstream")
    group.addoption("--bench-model", default=MODEL_NAME, choices=(MODEL_NAME, TINY), help="tiny: to try the suite out")
    group.addoption("--pairs", type=int, default=MAX_PAIRS, help="most pairs of a comparison")
    group.addoption("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    group.addoption("--results", type=Path, help="folder for the results, also of a run that is partial or scaled down")


def pytest_configure(config: pytest.Config) -> None:
    settings = {
        "model": config.getoption("--bench-model"),
        "prompt tokens": config.getoption("--prompt-tokens"),
        "pairs at most": config.getoption("--pairs"),
    }
    config.stash[_RESULTS] = Results(
        started=datetime.now(UTC),
        settings=settings,
        machine=describe_machine(),
        versions=versions(),
        commit=commit(ROOT),
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    # pytest-benchmark before 5.3 reads this name, which pytest has dropped in 9.2.
    item.__dict__.setdefault("_nodeid", item.nodeid)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    """The run's results; tests add their rows."""
    return request.config.stash[_RESULTS]


@pytest.fixture(scope="session")
def prompt_tokens(request: pytest.FixtureRequest) -> int:
    """Tokens of the prompts that are hit."""
    return int(request.config.getoption("--prompt-tokens"))


@pytest.fixture(scope="session")
def max_pairs(request: pytest.FixtureRequest) -> int:
    """Most pairs of a comparison."""
    return int(request.config.getoption("--pairs"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for what engines and servers print."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that is served."""
    if request.config.getoption("--bench-model") == TINY:
        return tiny_model(tmp_path_factory.mktemp("model"))
    return prepare_model()


@pytest.fixture(scope="module")
def fresh(model: Path) -> Prompts:
    """Makes prompts that no engine has seen: `fresh(n)` is n token ids. The same prompts in every run."""
    source = random.Random(0)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])

    def prompt(tokens: int) -> list[int]:
        # The first ids of a vocabulary are special tokens.
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    return prompt


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line at once, past pytest's capture: parts of a run take minutes."""
    reporter: Any = request.config.pluginmanager.getplugin("terminalreporter")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)

    return line


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash[_RESULTS]
    if not found.rows:
        return
    table = Table("what", "measured", "target", "verdict", "n", title="layerstream micro benchmarks")
    for row in found.rows:
        table.add_row(row.name, row.measured(), row.wanted(), row.verdict(), str(len(row.samples)))
    Console(width=max(120, terminalreporter._tw.fullwidth)).print(table)
    for row in found.rows:
        for remark in filter(None, (row.note, row.failure)):
            terminalreporter.write_line(f"{row.name}: {remark}")
    folder: Path | None = config.getoption("--results")
    sections: list[Section] = []
    if folder is not None:
        sections = [section for section in SECTIONS if found.rows_of(section)]
    elif _is_full_scale(found):
        folder = ROOT / "profiles" / "results"
        sections = [section for section in SECTIONS if found.complete(section)]
    for section in sections:
        assert folder is not None
        terminalreporter.write_line(f"recorded in {found.write(folder, section)}")
    if not sections:
        terminalreporter.write_line("not recorded: the run is partial or scaled down; --results FOLDER records it")


def _is_full_scale(found: Results) -> bool:
    wanted = {"model": MODEL_NAME, "prompt tokens": PROMPT_TOKENS, "pairs at most": MAX_PAIRS}
    return wanted.items() <= found.settings.items()
