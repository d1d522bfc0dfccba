# SPDX-License-Identifier: Apache-2.0
"""What is called again and again returns Deferreds: Debian 12's LoopingCall awaits no coroutines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[1]
PACKAGES = ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver")


def coroutines_in_loops(text: str) -> Iterator[str]:
    """Yield the coroutine functions that a module has called by a LoopingCall."""
    nodes = list(ast.walk(ast.parse(text)))
    plain = {
        node.name
        for node in nodes
        if isinstance(node, ast.AsyncFunctionDef)
        and not any(ast.unparse(each) == "deferred" for each in node.decorator_list)
    }
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("LoopingCall"):
            name = ast.unparse(node.args[0]).removeprefix("self.")
            if name in plain:
                yield name


class LoopTests(SynchronousTestCase):
    def test_they_call_functions_that_return_deferreds(self) -> None:
        found = {
            str(path.relative_to(TREE)): names
            for package in PACKAGES
            for path in sorted((TREE / package).rglob("*.py"))
            if "LoopingCall(" in (text := path.read_text()) and (names := list(coroutines_in_loops(text)))
        }
        self.assertEqual(found, {})

    def test_one_that_does_not_is_found(self) -> None:
        plain = "LoopingCall(look)\nasync def look(): ...\n"
        self.assertEqual(list(coroutines_in_loops(plain)), ["look"])
        self.assertEqual(list(coroutines_in_loops(plain.replace("async", "@deferred\nasync"))), [])
