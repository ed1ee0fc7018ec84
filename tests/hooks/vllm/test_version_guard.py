"""A vLLM that no longer does what the connector relies on is told apart from one that only looks different."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from layerstream.hooks.vllm.connector import LayerStreamConnector
from tests.hooks.vllm.contract import reviewed
from tests.hooks.vllm.contract.__main__ import main
from tests.hooks.vllm.contract.facts import Order
from tests.hooks.vllm.contract.relied_on import RELIED_ON
from tests.hooks.vllm.contract.reviewed import compare, facts_of, read, versions
from tests.hooks.vllm.contract.source import ABSENT, Source, installed

ROOT = Path(__file__).resolve().parents[3]
WATCHED = {name for fact in RELIED_ON if isinstance(fact, Order) for name in fact.watched.split()}


def test_the_installed_vllm_does_what_is_relied_on() -> None:
    if found := compare(installed()):
        pytest.fail(found, pytrace=False)


def test_every_version_that_the_package_admits_was_reviewed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", project["optional-dependencies"]["vllm"][0])
    assert bounds is not None
    assert versions() == [f"0.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]


def test_nothing_is_watched_in_vain() -> None:
    """A misspelt name would never change."""
    contracts = [read(minor) for minor in versions()]
    seen = {name for facts in contracts for lines in facts.values() for name in re.findall(r"\w+", " ".join(lines))}
    assert WATCHED - seen == set()
    for fact in RELIED_ON:
        lines = [line for facts in contracts for line in facts[fact.title]]
        assert any(ABSENT not in line for line in lines), fact.title
    newest = [line for lines in contracts[-1].values() for line in lines if ABSENT in line]
    assert newest == [], "what the newest version lacks cannot be relied on"


def test_each_fact_has_a_title_of_its_own() -> None:
    titles = [fact.title for fact in RELIED_ON]
    assert len(titles) == len(set(titles))


def test_the_connector_overrides_what_vllm_calls_and_takes_its_arguments() -> None:
    own = {name: value for name, value in vars(LayerStreamConnector).items() if not name.startswith("_")}
    bases = {**vars(SupportsHMA), **vars(KVConnectorBase_V1)}
    assert set(own) - set(bases) == {"scheduler", "worker"}
    for name in own.keys() & bases.keys():
        theirs, ours = (
            getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name),
            getattr(LayerStreamConnector, name),
        )
        if callable(theirs):
            wanted, given = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
            assert list(wanted) == list(given), name
    assert not LayerStreamConnector.__abstractmethods__


def test_every_name_that_hooks_import_from_vllm_is_there() -> None:
    source, missing, count = installed(), [], 0
    for path in sorted((ROOT / "hooks" / "vllm").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                inside = "/".join((node.module or "").split(".")[1:])
                for alias in node.names:
                    count += 1
                    places = (f"{inside}.py", f"{inside}/__init__.py".removeprefix("/"))
                    if not any(source.find(place, alias.name) for place in places):
                        missing.append(f"{path.name}: from {node.module} import {alias.name}")
    # `from vllm import LLM` goes through a module's __getattr__.
    assert [one for one in missing if "from vllm import" not in one] == []
    assert count > 20


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for contracts that hold little."""
    few = [fact for fact in RELIED_ON if "_get_kv_connector_output" in fact.title or "SchedulerOutput" in fact.title]
    contracts = {minor: {fact.title: read(minor)[fact.title] for fact in few} for minor in versions()}
    monkeypatch.setattr(reviewed, "RELIED_ON", few)
    monkeypatch.setattr(reviewed, "FOLDER", tmp_path)
    for minor, facts in contracts.items():
        reviewed.write(minor, facts)
    return tmp_path


def test_a_contract_that_says_otherwise_is_told_and_one_command_accepts_what_is_found(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = installed()
    path = reviewed.path_of(real.minor)
    assert path.parent == own_folder
    untouched = path.read_text()
    path.write_text(untouched.replace(".bind_connector_metadata(.kv_connector_metadata)\n", "", 1))
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "+.bind_connector_metadata(.kv_connector_metadata)" in said
    assert f"KVConnectorModelRunnerMixin._get_kv_connector_output (reviewed {real.minor})" in said
    assert reviewed.ACCEPT in said
    assert main(["--accept"]) == 0
    assert path.read_text() == untouched
    capsys.readouterr()
    assert main([]) == 0
    assert "does what is relied on" in capsys.readouterr().out


class Renamed(Source):
    def text(self, file: str) -> str | None:
        return "__version__ = version = '0.99.1'" if file == "_version.py" else super().text(file)


def test_a_version_that_was_never_reviewed_is_compared_with_the_last_one(own_folder: Path) -> None:
    new, last = Renamed(installed().root), versions()[-1]
    reviewed.write(last, facts_of(new))
    said = compare(new)
    assert "vLLM 0.99 was never reviewed" in said and f"differs from {last}" in said
    assert "Nothing that is relied on has changed." in said
    path = own_folder / f"vllm-{last}.txt"
    path.write_text(path.read_text().replace("has_sync_kv_loads: bool = False\n", ""))
    assert f"SchedulerOutput (reviewed {last})" in compare(new)
    reviewed.write("0.99", facts_of(new))
    assert versions()[-1] == "0.99"
    assert compare(new) == ""
