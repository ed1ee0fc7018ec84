from __future__ import annotations

import ast
from pathlib import Path

import pytest

from profiles import mutations
from profiles.mutations import MUTATIONS, Mutation, StaleFault

PARTS = {"layerstream/coordinator.py", "layerstream/index.py", "layerstream/engine.py", "hooks/vllm/scheduler.py"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_fault_can_be_made_and_leaves_code(mutation: Mutation) -> None:
    source = (mutations.ROOT / mutation.file).read_text(encoding="utf-8")
    assert "\n" not in mutation.old + mutation.new
    assert mutation.old != mutation.new
    assert ast.dump(ast.parse(mutation.applied(source))) != ast.dump(ast.parse(source))
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (mutations.ROOT / file).read_text(encoding="utf-8")


def test_there_are_at_least_twenty_in_all_parts() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
    assert {mutation.file for mutation in MUTATIONS} >= PARTS


@pytest.mark.parametrize("source", ["", "a = 1\na = 1\n"], ids=["gone", "twice"])
def test_text_that_is_not_there_once_is_told_with_what_to_do(source: str) -> None:
    fault = Mutation(name="lost", file="x.py", old="a = 1", new="a = 2", tests=())
    with pytest.raises(StaleFault, match=r"'lost' replaces 'a = 1' in x.py, which is there \d times .* anew"):
        fault.applied(source)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one function and its test."""
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text("import doubling\n\ndef test_two(): assert doubling.double(2) == 4\n")
    monkeypatch.setattr(mutations, "COPIED", ("doubling.py", "test_code.py"))
    return tmp_path


def test_what_a_test_finds_is_told_with_the_test_and_the_source_stays(tree: Path) -> None:
    faults = [
        Mutation(name=name, file="doubling.py", old="2 * x", new=new, tests=("test_code.py",))
        for name, new in (("seen", "3 * x"), ("not seen", "x + x"))
    ]
    verdicts = mutations.try_out(faults, tree)
    assert [verdict.caught_by for verdict in verdicts] == ["test_code.py::test_two", None]
    assert "2 * x" in (tree / "doubling.py").read_text()


def test_tests_that_fail_without_a_fault_are_no_proof(tree: Path) -> None:
    (tree / "doubling.py").write_text("def double(x):\n    return 5 * x\n")
    fault = Mutation(name="any", file="doubling.py", old="5 * x", new="6 * x", tests=("test_code.py",))
    with pytest.raises(RuntimeError, match=r"test_code\.py::test_two fails without any fault"):
        mutations.try_out([fault], tree)


def test_a_fault_that_cannot_be_made_ends_the_run_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = Mutation(name="stale", file="layerstream/engine.py", old="no such text", new="", tests=())
    monkeypatch.setattr(mutations, "MUTATIONS", (stale,))
    assert mutations.main([]) == 2
    assert "'stale' replaces 'no such text' in layerstream/engine.py, which is there 0 times" in capsys.readouterr().err
