# SPDX-License-Identifier: Apache-2.0
"""Which module imports which, and so which tests may notice a bug in a module."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

PRODUCT = ("txgrpc", "infranetes_common", "infranetes", "vmserver", "infranetes_simulation")
# Tests with VMs, clusters, other implementations, and whole daemons: far too slow to be run for each mutant.
SLOW = (
    "tests.e2e",
    "tests.cluster",
    "tests.delegates",
    "tests.workloads",
    "tests.conformance",
    "tests.interop",
    "tests.bench",
    "tests.demo",
    "tests.docs",
    "tests.harness",
    "tests.mutants",
    "tests.infranetes.daemon",
)


def within(module: str, packages: Collection[str]) -> bool:
    """Return whether a dotted name is one of `packages` or inside of one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Imports:
    """The imports of all modules of a tree."""

    def __init__(self, root: Path) -> None:
        self.paths = {
            dotted(path.relative_to(root)): path
            for package in (*PRODUCT, "tests")
            for path in sorted((root / package).rglob("*.py"))
        }
        self._imported = functools.cache(self._read)

    def closure(self, module: str, packages: Collection[str]) -> set[str]:
        """Return a module and what it imports, directly and indirectly by way of modules of `packages`."""
        found, new = {module}, [module]
        while new:
            for each in self._imported(new.pop()) - found:
                found.add(each)
                if within(each, packages):
                    new.append(each)
        return found

    def digest(self, module: str) -> str:
        """Return a digest of a module and everything that it imports, except what runs tests."""
        digest = hashlib.sha256()
        for each in sorted(self.closure(module, (*PRODUCT, "tests"))):
            if not within(each, ["tests.harness"]):
                digest.update(each.encode() + b"\0" + self.paths[each].read_bytes() + b"\0")
        return digest.hexdigest()

    def modules(self, package: str) -> list[str]:
        """Return the modules of a package, or the module of this name."""
        return [name for name in self.paths if within(name, [package])]

    def tests_of(self, modules: Collection[str]) -> list[str]:
        """Return the modules of the tests that mirror `modules`.

        These are the tests of the package of the same name, ``tests.PACKAGE``. Where it does not exist, they
        are those of the package above it that have the name: ``test_farm`` of ``infranetes_simulation.farm``.
        """
        found: dict[str, None] = {}
        for package in dict.fromkeys(map(self._package, modules)):
            above, _, name = package.rpartition(".")
            mirrored = self._tests([f"tests.{package}"]) or [
                each for each in self._tests([f"tests.{above}"]) if f".test_{name}" in each
            ]
            found |= dict.fromkeys(mirrored)
        return list(found)

    def tests_importing(self, modules: Collection[str]) -> list[str]:
        """Return the modules of tests that import one of `modules`, or whose cases and fakes do."""
        return [each for each in self._tests(["tests"]) if self.closure(each, ["tests"]) & set(modules)]

    def _tests(self, packages: Collection[str]) -> list[str]:
        tests = [name for name in self.paths if name.rpartition(".")[2].startswith("test_")]
        return [name for name in tests if within(name, packages) and not within(name, SLOW)]

    def _package(self, module: str) -> str:
        is_package = self.paths[module].name == "__init__.py"
        return module if is_package else module.rpartition(".")[0]

    def _read(self, module: str) -> frozenset[str]:
        return frozenset(self._named(module) & self.paths.keys())

    def _named(self, module: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(ast.parse(self.paths[module].read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found |= set(_with_packages(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= set(_with_packages(node.module))
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def _with_packages(name: str) -> Iterator[str]:
    """Yield a module's name and those of the packages that it is in, which are imported with it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def dotted(path: Path) -> str:
    """Return the dotted name of a module by its path below the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
