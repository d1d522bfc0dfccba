# SPDX-License-Identifier: Apache-2.0
"""What the modules of the product import, read from their text."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("txgrpc", "infranetes_common", "infranetes", "vmserver", "infranetes_simulation")


def within(module: str, room: str) -> bool:
    """Whether the dotted `module` is `room` or inside of it."""
    return module == room or module.startswith(f"{room}.")


def beside(module: str, room: str) -> str:
    """Return which package or module of those right below `room` the dotted `module` is in; "": in none."""
    if not module.startswith(f"{room}."):
        return ""
    return f"{room}.{module.removeprefix(f'{room}.').partition('.')[0]}"


def of_types(node: ast.AST) -> bool:
    """Whether `node` is a block that only type checkers run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below `node` that runs."""
    for child in ast.iter_child_nodes(node):
        if not of_types(child):
            yield child
            yield from statements(child)


def imported(path: Path, types: bool) -> set[str]:
    """The modules that `path` imports when it runs, those inside of functions too.

    :param types: and what it imports for type checkers alone."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if types else statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@functools.cache
def modules(types: bool = False) -> dict[str, set[str]]:
    """Each module of the product, by its dotted name, with what it imports. :param types: as above."""
    found = {}
    for package in PACKAGES:
        for path in sorted((TREE / package).rglob("*.py")):
            parts = path.relative_to(TREE).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = imported(path, types)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One way around in `graph`; empty: there is none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for following in sorted(graph.get(name, ())):
            if found := walk(following, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := walk(name, []))), [])
