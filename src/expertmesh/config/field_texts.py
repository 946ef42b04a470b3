"""Texts of options: the docstrings under the fields of a class, read by one parse of its module."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping

Texts = dict[str, dict[str, str]]


def field_texts(kind: type) -> Mapping[str, str]:
    """Docstrings under the fields of a class itself, by field; empty if its source cannot be read."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return {} if file is None else _texts_of(file).get(kind.__qualname__, {})


@functools.cache
def _texts_of(file: str) -> Texts:
    """Docstrings of a module's fields, by the qualified name of their class."""
    try:
        with open(file, "rb") as source:  # noqa: PTH123  pathlib is slower, and all verbs wait for this
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    return dict(_classes(tree, ""))


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.ClassDef):
            yield prefix + one.name, dict(_below_fields(one.body))
            yield from _classes(one, f"{prefix}{one.name}.")
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(one, f"{prefix}{one.name}.<locals>.")
        elif isinstance(one, ast.If | ast.Try | ast.With):
            yield from _classes(one, prefix)


def _below_fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in zip(body, body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, inspect.cleandoc(text)
