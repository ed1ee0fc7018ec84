"""Facts that are looked for in many places: which classes, functions and statements there are of a kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.hooks.vllm.contract.facts import Fact, base
from tests.hooks.vllm.contract.outline import reduced
from tests.hooks.vllm.contract.signatures import Function, last_name
from tests.hooks.vllm.contract.source import ABSENT, Source, functions

_MUTATORS: Final = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Fact):
    """Every class of a file that derives from another one of it."""

    file: str
    root: str

    @property
    def title(self) -> str:
        return f"{self.file}: classes that derive from {self.root}"

    def lines(self, source: Source) -> list[str]:
        family, lines = {self.root}, []
        module = source.tree(self.file)
        for one in module.body if module else ():
            if isinstance(one, ast.ClassDef) and family & {last_name(base) for base in one.bases}:
                family.add(one.name)
                lines.append(base(one))
        return sorted(lines) or [ABSENT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decorated(Fact):
    """Every function under a decorator."""

    decorator: str
    folders: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"functions under @{self.decorator}"

    def lines(self, source: Source) -> list[str]:
        return [
            f"{file}: {name}"
            for file, module in source.mentioning([self.decorator], self.folders)
            for name, function in functions(module)
            if self.decorator in map(last_name, function.decorator_list)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Callers(Fact):
    """Every function that calls a method of a KV connector."""

    methods: str
    """Names, with spaces between."""
    folders: tuple[str, ...]

    @property
    def title(self) -> str:
        return "who calls a KV connector"

    def lines(self, source: Source) -> list[str]:
        return sorted(
            f"{method}: {file}: {name}"
            for file, module in source.mentioning(self.methods.split(), self.folders)
            for name, function in functions(module)
            for method in _called(function, set(self.methods.split()))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes(Fact):
    """Every statement that rebinds an attribute of this name or changes the list it holds."""

    attribute: str
    folders: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"what changes .{self.attribute}"

    def lines(self, source: Source) -> list[str]:
        return [
            f"{file}: {name}: {statement}"
            for file, module in source.mentioning([f".{self.attribute}"], self.folders)
            for name, function in functions(module)
            for statement in _changes(function, self.attribute)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defined(Fact):
    """Every function of this name."""

    name: str
    folders: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"functions called {self.name}"

    def lines(self, source: Source) -> list[str]:
        return sorted(
            f"{file}: {name}"
            for file, module in source.mentioning([f"def {self.name}"], self.folders)
            for name, _ in functions(module)
            if name.rpartition(".")[2] == self.name
        )


def _changes(function: Function, attribute: str) -> Iterator[str]:
    def is_it(node: ast.AST) -> bool:
        node = node.value if isinstance(node, ast.Subscript) else node
        return isinstance(node, ast.Attribute) and node.attr == attribute

    for node in ast.walk(function):
        match node:
            case ast.Assign(targets) | ast.Delete(targets) if any(map(is_it, targets)):
                yield from reduced(node, {attribute})
            case ast.AnnAssign(target) | ast.AugAssign(target) if is_it(target):
                yield from reduced(node, {attribute})
            case ast.Call(ast.Attribute(value, method)) if method in _MUTATORS and is_it(value):
                yield from reduced(ast.Expr(node), {attribute})


def _called(function: Function, methods: set[str]) -> set[str]:
    """Those of `methods` that a function calls on what its name tells to be a KV connector."""
    return {
        node.func.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
        if (owner := last_name(node.func.value).lower()) not in ("ec_connector", "aux_output_connector")
        if "connector" in owner or "kv_transfer_group" in owner
    }
