"""The installed vLLM as text: read and parsed, never imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.hooks.vllm.contract.signatures import Function

ABSENT = "(absent)"
"""What stands for a file, class, function or name that is not there."""


@cache
def installed() -> Source:
    """The vLLM that `import vllm` would find.

    Raises:
        ModuleNotFoundError: there is none.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed in this environment")
    return Source(Path(next(iter(found.submodule_search_locations))))


class Source:
    """The folder of a `vllm` package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = cache(self._tree)

    @property
    def version(self) -> str:
        """As the wheel was built, without what names the build: `0.32.0`.

        Raises:
            ValueError: it is not written where vLLM's build writes it.
        """
        found = re.search(r"version = '(\d+\.\d+\.\d+)", self.text("_version.py") or "")
        if found is None:
            raise ValueError(f"{self.root / '_version.py'} does not say which version it is")
        return found[1]

    @property
    def minor(self) -> str:
        """`0.32` of `0.32.0`."""
        return ".".join(self.version.split(".")[:2])

    def find(self, file: str, name: str) -> ast.AST | None:
        """A module's class, function, method or variable by its dotted name; the last one where it is overloaded."""
        node: ast.AST | None = self.tree(file)
        for part in name.split("."):
            node = next((one for one in reversed(_children(node)) if part in _names(one)), None)
        return node

    def function(self, file: str, name: str) -> Function | None:
        """As `find`."""
        found = self.find(file, name)
        return found if isinstance(found, Function) else None

    def class_(self, file: str, name: str) -> ast.ClassDef | None:
        """As `find`."""
        found = self.find(file, name)
        return found if isinstance(found, ast.ClassDef) else None

    def mentioning(self, texts: Iterable[str], folders: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
        """Modules that hold one of `texts`, in the order of their names."""
        wanted = re.compile("|".join(map(re.escape, texts)))
        for path in sorted(path for folder in folders for path in (self.root / folder).rglob("*.py")):
            file = path.relative_to(self.root).as_posix()
            if wanted.search(self.text(file) or "") and (module := self.tree(file)):
                yield file, module

    def text(self, file: str) -> str | None:
        """What a file holds; None if there is none."""
        path = self.root / file
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _tree(self, file: str) -> ast.Module | None:
        text = self.text(file)
        return None if text is None else ast.parse(text, file)


def functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name; those inside functions belong to their function."""
    for child in _children(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{inside}{child.name}.")
        elif isinstance(child, Function):
            yield inside + child.name, child


def _children(node: ast.AST | None) -> list[ast.stmt]:
    """Statements of a module or a class, also those under a condition."""
    found: list[ast.stmt] = []
    for statement in getattr(node, "body", ()):
        found += [statement]
        if isinstance(statement, ast.If | ast.Try):
            found += _children(statement)
    return found


def _names(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}
        case ast.AnnAssign(ast.Name(name)):
            return {name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
    return set()
