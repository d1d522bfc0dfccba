# SPDX-License-Identifier: Apache-2.0
"""A module's text by the nodes of its syntax tree, and the places of it in which a bug could be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import attrs

# What is only for people to read, or only for the type checker.
NOT_MUTATED_FUNCTIONS = frozenset({"__repr__", "__str__"})
NOT_MUTATED_CLASSES = frozenset({"Interface", "Protocol", "NamedTuple", "TypedDict"})
LOGGING = re.compile(
    r"(^|\.)_?(log|logger)\.(debug|info|warn|warning|error|failure|critical|emit|exception)$"
)
TYPE_FIELDS = frozenset({"annotation", "returns", "decorator_list", "type_params"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen
class Span:
    """A part of a source, in bytes from its beginning."""

    start: int
    end: int


@attrs.frozen
class Place:
    """A node in the body of a function, the innermost statement that it is in, and the function's name."""

    node: ast.AST
    statement: ast.stmt
    function: Function
    name: str


class Source:
    """The text of a module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.encoded = text.encode()
        self.tree = ast.parse(text)
        self._lines = [0]  # where each line begins; the offsets of a syntax tree are in bytes
        for line in self.encoded.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a place that a syntax tree names."""
        return self._lines[line - 1] + column

    def span(self, first: ast.AST, last: ast.AST | None = None) -> Span:
        """Return the span of a node, or from one node to another."""
        last = last or first
        assert isinstance(first, HAS_PLACE) and isinstance(last, HAS_PLACE)
        assert last.end_lineno is not None and last.end_col_offset is not None
        return Span(
            self.offset(first.lineno, first.col_offset), self.offset(last.end_lineno, last.end_col_offset)
        )

    def of(self, first: ast.AST, last: ast.AST | None = None) -> str:
        """Return the text of a node, or from one node to another."""
        span = self.span(first, last)
        return self.encoded[span.start : span.end].decode()

    def replaced(self, span: Span, replacement: str) -> str:
        """Return the whole text with something else in a span."""
        return (self.encoded[: span.start] + replacement.encode() + self.encoded[span.end :]).decode()

    def places(self) -> Iterator[Place]:
        """Return the nodes of all functions' bodies, except those that only people or type checkers read."""
        for function, name in _functions(self.tree, ""):
            for statement in function.body:
                yield from _places(statement, statement, function, name)


HAS_PLACE = (ast.expr, ast.stmt, ast.keyword, ast.ExceptHandler)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[Function, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = f"{prefix}{child.name}"
            if child.name not in NOT_MUTATED_FUNCTIONS:
                yield child, name
                yield from _functions(child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            if not any(ast.unparse(base).split(".")[-1] in NOT_MUTATED_CLASSES for base in child.bases):
                yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt):
            yield from _functions(child, prefix)


def _places(node: ast.AST, statement: ast.stmt, function: Function, name: str) -> Iterator[Place]:
    if _is_left_out(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    yield Place(node, statement, function, name)
    for field, value in ast.iter_fields(node):
        if field not in TYPE_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _places(child, statement, function, name)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or is_logging(node.value)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    # Texts of errors, and f-strings, whose parts have no exact place before Python 3.12. Functions inside of
    # functions are places of their own.
    return isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.ClassDef | Function)


def is_logging(node: ast.AST) -> bool:
    """Return whether an expression only writes to the log."""
    if isinstance(node, ast.Await):
        node = node.value
    return isinstance(node, ast.Call) and LOGGING.search(ast.unparse(node.func)) is not None
