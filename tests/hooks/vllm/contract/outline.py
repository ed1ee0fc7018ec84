"""A function reduced to what matters of it: watched names, in their order, inside the conditions and loops around them.

Layout, comments, messages, names of other variables and other statements are gone; two functions with equal outlines do
the same as far as the watched names go. Everything else reads `_`; a method reads `.method`, whatever it is called on.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

from tests.hooks.vllm.contract.signatures import Function, last_name

_INDENT = "    "


def outline(function: Function, watched: Iterable[str], whole: Iterable[str] = ()) -> list[str]:
    """The lines of a function's body that are left.

    Args:
        function: any.
        watched: names of methods, attributes and variables, and of arguments given by name.
        whole: names of methods whose calls show all arguments given by position; others show watched ones.
    """
    return _Outline(frozenset(watched), frozenset(whole)).block(function.body, flow=False)


def reduced(statement: ast.stmt, watched: Iterable[str]) -> list[str]:
    """As `outline`, of a single statement."""
    return _Outline(frozenset(watched), frozenset()).block([statement], flow=False)


class _Outline:
    def __init__(self, watched: frozenset[str], whole: frozenset[str]) -> None:
        self._watched, self._whole = watched, whole

    # Statements

    def block(self, body: Sequence[ast.stmt], *, flow: bool) -> list[str]:
        """What is left of `body`. With `flow`, also where it ends early: its condition is about a watched name."""
        return [line for statement in body for line in self._statement(statement, flow=flow)]

    def _statement(self, node: ast.stmt, *, flow: bool) -> list[str]:
        match node:
            case ast.If():
                return self._if(node)
            case ast.For() | ast.AsyncFor():
                loop = self._reduce(node.iter)
                return _under(f"for _ in {_text(loop)}" if loop else "for", self.block(node.body, flow=flow))
            case ast.While():
                test = self._reduce(node.test)
                return _under(f"while {_text(test)}" if test else "while", self.block(node.body, flow=flow))
            case ast.With() | ast.AsyncWith():
                contexts = [found for item in node.items if (found := self._reduce(item.context_expr))]
                body = self.block(node.body, flow=flow)
                return _under(f"with {', '.join(map(_text, contexts))}", body, even_if_empty=True) if contexts else body
            case ast.Try() | ast.TryStar():
                return self._try(node, flow=flow)
            case ast.Match():
                return [line for case in node.cases for line in _under("case", self.block(case.body, flow=flow))]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return _under(f"def {node.name}", self.block(node.body, flow=False))
            case ast.Continue() | ast.Break() | ast.Raise():
                return [type(node).__name__.lower()] if flow else []
        return self._simple(node, flow=flow)

    def _if(self, node: ast.If) -> list[str]:
        test = self._reduce(node.test)
        then, other = (self.block(part, flow=test is not None) for part in (node.body, node.orelse))
        lines = _under(f"if {_text(test or _ANY)}", then, even_if_empty=bool(other) or _acts(test))
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and bool(other)
        return lines + ([f"el{other[0]}", *other[1:]] if is_elif else _under("else", other))

    def _try(self, node: ast.Try | ast.TryStar, *, flow: bool) -> list[str]:
        body = self.block([*node.body, *node.orelse], flow=flow)
        caught = [line for handler in node.handlers for line in _under("except", self.block(handler.body, flow=flow))]
        last = _under("finally", self.block(node.finalbody, flow=flow))
        return _under("try", body, even_if_empty=True) + caught + last if caught or last else body

    def _simple(self, node: ast.stmt, *, flow: bool) -> list[str]:
        match node:
            case ast.Return(value):
                found = self._reduce(value)
                if found is None and flow:
                    found = value if isinstance(value, ast.Constant) else ast.Name("")
                return [f"return {_text(found)}".rstrip()] if found else []
            case ast.Assert(test):
                # Hints for a type checker come and go.
                is_hint = "is not None" in ast.unparse(test) or "isinstance" in ast.unparse(test)
                return [f"assert {_text(found)}"] if not is_hint and (found := self._reduce(test)) else []
            case ast.Expr(value):
                return [_text(found)] if (found := self._value(value)) else []
            case ast.Delete(targets):
                return [f"del {_text(found)}" for one in targets if (found := self._reduce(one))]
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assignment(node)
        return []

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
        if node.value is None:
            return []
        places = node.targets if isinstance(node, ast.Assign) else [node.target]
        targets = [text for one in places if (text := self._target(one))]
        if not targets:
            place = places[0]
            is_state = isinstance(node.value, ast.Attribute) and node.value.attr in self._watched
            if is_state and isinstance(place, ast.Attribute):
                return [f"{_text(_plain(place))} = {_text(_plain(node.value))}"]
            return [_text(found)] if (found := self._value(node.value)) else []
        value = self._reduce(node.value)
        if isinstance(node.value, ast.Call) and not _acts(value):
            value = None
        sign = "=" if not isinstance(node, ast.AugAssign) else f"{_text(ast.BinOp(_ANY, node.op, _ANY))[2:-2]}="
        return [f"{' = '.join(targets)} {sign} {_text(value or _plain(node.value))}"]

    # Expressions

    def _value(self, node: ast.expr) -> ast.expr | None:
        """As `_reduce`, for a value that goes to nothing watched: what is merely read for it does not count."""
        found = self._reduce(node)
        return found if _acts(found) else None

    def _target(self, node: ast.expr) -> str:
        """Those of one or several targets that are watched."""
        parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
        return ", ".join(_text(found) for one in parts if (found := self._reduce(one)))

    def _reduce(self, node: ast.expr | None) -> ast.expr | None:
        """The expression with all else replaced by `_`; None if nothing in it is watched."""
        match node:
            case ast.Name(name):
                return node if name in self._watched else None
            case ast.Attribute(value, name):
                base = self._reduce(value)
                if name in self._watched:
                    return ast.Attribute(base, name) if base else ast.Name(f".{name}")
                return ast.Attribute(base, name) if base else None
            case ast.Call():
                return self._call(node)
            case ast.BoolOp(operator, values):
                return self._bool(operator, values)
            case ast.NamedExpr(_, value) | ast.Await(value):
                return self._reduce(value)
            case ast.Yield() | ast.YieldFrom():
                return ast.Name("yield")
            case ast.UnaryOp() | ast.BinOp() | ast.Compare() | ast.IfExp() | ast.Subscript() | ast.Slice():
                return self._rebuild(node)
            case ast.Tuple() | ast.List() | ast.Starred():
                return self._rebuild(node)
            case None | ast.Constant() | ast.JoinedStr():
                return None
        return _joined(self._reduce(part) for part in _parts(node))

    def _call(self, node: ast.Call) -> ast.expr | None:
        if isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "logger":
            return None
        callee = self._reduce(node.func)
        if callee is None:
            return _joined(self._reduce(part) for part in [*node.args, *(word.value for word in node.keywords)])
        words = [word for word in node.keywords if word.arg is None or word.arg in self._watched]
        return ast.Call(
            callee,
            self._arguments(node),
            [ast.keyword(word.arg, self._argument(word.value)) for word in words],
        )

    def _arguments(self, node: ast.Call) -> list[ast.expr]:
        if last_name(node) in self._whole:
            return [self._argument(one) for one in node.args]
        return [found for one in node.args if (found := self._reduce(one))]

    def _argument(self, node: ast.expr) -> ast.expr:
        return self._reduce(node) or _plain(node)

    def _bool(self, operator: ast.boolop, values: list[ast.expr]) -> ast.expr | None:
        reduced = [self._reduce(one) for one in values]
        if not any(reduced):
            return None
        # However many conditions are not watched, they read as one.
        first = next((index for index, one in enumerate(reduced) if one is None), None)
        left = [one or _ANY for index, one in enumerate(reduced) if one or index == first]
        return left[0] if len(left) == 1 else ast.BoolOp(operator, left)

    def _rebuild(self, node: ast.expr) -> ast.expr | None:
        found = False

        def child(value: object) -> object:
            nonlocal found
            if not isinstance(value, ast.expr):
                return [child(one) for one in value] if isinstance(value, list) else value
            reduced = self._reduce(value)
            found = found or reduced is not None
            return reduced or (value if isinstance(value, ast.Constant) else _ANY)

        fields = {name: child(value) for name, value in ast.iter_fields(node)}
        make: Callable[..., ast.expr] = type(node)
        built = make(**fields)
        return built if found else None


_ANY = ast.Name("_")


def _plain(node: ast.expr) -> ast.expr:
    """What stands for an argument or a value that is not watched: its last name if that tells something."""
    match node:
        case ast.Constant():
            return node
        case ast.Attribute(_, name):
            return ast.Name(f".{name}")
        case ast.Call():
            return ast.Name(f"{last_name(node) or '_'}()")
        case ast.Starred():
            return ast.Starred(_ANY)
    return _ANY


def _acts(node: ast.AST | None) -> bool:
    """Whether it is more than names that are read."""
    return node is not None and any(isinstance(part, ast.Call) or _is_yield(part) for part in ast.walk(node))


def _is_yield(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "yield"


def _parts(node: ast.AST) -> list[ast.expr]:
    """The expressions right under `node`; those of a comprehension in the order in which they are evaluated."""
    generators = [part for loop in getattr(node, "generators", ()) for part in _parts(loop)]
    return generators + [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]


def _joined(parts: Iterable[ast.expr | None]) -> ast.expr | None:
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else ast.Tuple(found) if found else None


def _under(head: str, body: list[str], *, even_if_empty: bool = False) -> list[str]:
    if not body and not even_if_empty:
        return []
    return [f"{head}:", *(_INDENT + line for line in body or ["..."])]


def _text(node: ast.expr) -> str:
    return ast.unparse(node)
