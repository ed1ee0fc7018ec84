"""Functions as their callers see them."""

from __future__ import annotations

import ast

Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature(function: Function) -> str:
    """Kind, name, parameters with defaults, and result; parameters' types left out."""
    arguments = ast.parse(f"def _({ast.unparse(function.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    kinds = [last_name(one) for one in function.decorator_list]
    shown = [f"@{kind} " for kind in kinds if kind not in ("", "override")]
    result = "" if function.returns is None else f" -> {annotation(function.returns)}"
    return f"{''.join(shown)}{function.name}({ast.unparse(arguments.args)}){result}"


def annotation(node: ast.expr) -> str:
    """A type as text; one written as a string reads like any other."""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
    return text if "Literal[" in text else text.replace("'", "")


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, or of a call to it; empty if there is none."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def without_docstring(function: Function) -> list[ast.stmt]:
    """The statements of a function's body."""
    first, *rest = function.body
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return rest if is_text else function.body
