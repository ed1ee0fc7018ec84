"""Kinds of facts about vLLM's source, each read anew from the text and shown in lines that a person can compare."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.hooks.vllm.contract.outline import outline
from tests.hooks.vllm.contract.signatures import Function, annotation, last_name, signature, without_docstring
from tests.hooks.vllm.contract.source import ABSENT, Source

# Calls of vLLM to a connector, whose arguments count.
_WHOLE: Final = (
    "handle_preemptions bind_connector_metadata start_load_kv wait_for_layer_load save_kv_layer get_transfer_results "
    "get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output request_finished "
    "request_finished_all_groups bind_kv_cache_manager register_kv_caches set_xfer_handshake_metadata_pp_aware "
    "set_forward_context set_disabled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(ABC):
    """One thing relied on."""

    why: str
    """What of ours would go wrong, and where."""

    @property
    @abstractmethod
    def title(self) -> str:
        """File and name."""

    @abstractmethod
    def lines(self, source: Source) -> list[str]:
        """What is true of this vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Fact):
    """Which calls a function makes and what it reads and writes, in which order and under which conditions."""

    file: str
    function: str
    watched: str
    """Names, with spaces between."""

    @property
    def title(self) -> str:
        return f"{self.file}: {self.function}"

    def lines(self, source: Source) -> list[str]:
        found = source.function(self.file, self.function)
        if found is None:
            return [ABSENT]
        return outline(found, self.watched.split(), _WHOLE.split()) or ["nothing of what is watched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods(Fact):
    """Signatures of a class's methods; of short ones also what they do."""

    file: str
    cls: str
    only: str = ""
    """Names, with spaces between; all if empty."""

    @property
    def title(self) -> str:
        return f"{self.file}: methods of {self.cls}"

    def lines(self, source: Source) -> list[str]:
        found = source.class_(self.file, self.cls)
        if found is None:
            return [ABSENT]
        methods = {one.name: one for one in found.body if isinstance(one, Function)}
        if not self.only:
            return [base(found), *(_method(one) for one in methods.values())]
        return [_method(methods[name]) if name in methods else f"{name} {ABSENT}" for name in self.only.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Fact):
    """Fields of a dataclass, members of an enum, attributes of an object: what they hold and where it comes from."""

    file: str
    cls: str
    only: str = ""
    """Names, with spaces between; all that the class body declares if empty."""
    defaults: bool = True
    """Whether what a field holds unless told otherwise counts."""

    @property
    def title(self) -> str:
        return f"{self.file}: {self.cls}"

    def lines(self, source: Source) -> list[str]:
        found = source.class_(self.file, self.cls)
        if found is None:
            return [ABSENT]
        declared = {name: text for one in found.body for name, text in _declared(one)}
        made: dict[str, str] = {}
        for one in found.body:
            for name, text in _made(one) if isinstance(one, Function) else ():
                made.setdefault(name, text)
        if not self.defaults:
            declared = {name: text.split(" = ")[0] for name, text in declared.items()}
        if not self.only:
            return list(declared.values())
        return [declared.get(name) or made.get(name) or f"{name} {ABSENT}" for name in self.only.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names(Fact):
    """Functions, with their signatures, and variables, with their values, of a module."""

    file: str
    names: str
    """With spaces between."""

    @property
    def title(self) -> str:
        return f"{self.file}: {', '.join(self.names.split())}"

    def lines(self, source: Source) -> list[str]:
        lines = []
        for name in self.names.split():
            match source.find(self.file, name):
                case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                    lines.append(_method(function))
                case ast.Assign() | ast.AnnAssign() as variable:
                    lines.append(ast.unparse(variable))
                case ast.Import() | ast.ImportFrom():
                    lines.append(f"{name} is imported")
                case ast.ClassDef() as found:
                    lines.append(base(found))
                case _:
                    lines.append(f"{name} {ABSENT}")
        return lines


def base(node: ast.ClassDef) -> str:
    """A class with what it derives from."""
    return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"


def _method(function: Function) -> str:
    body = without_docstring(function)
    is_short = len(body) == 1 and isinstance(body[0], ast.Return | ast.Pass | ast.Raise)
    return f"{signature(function)}{f': {ast.unparse(body[0])}' if is_short else ''}"


def _declared(node: ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.AnnAssign(ast.Name(name), kind, value):
            yield name, f"{name}: {annotation(kind)}{'' if value is None else f' = {ast.unparse(value)}'}"
        case ast.Assign([ast.Name(name)], value):
            yield name, f"{name} = {ast.unparse(value)}"
        case ast.FunctionDef() if {"property", "cached_property"} & set(map(last_name, node.decorator_list)):
            yield node.name, _method(node)


def _made(function: Function) -> Iterator[tuple[str, str]]:
    """What a method sets on its object."""
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, f"self.{target.attr} is set in {function.name}"
