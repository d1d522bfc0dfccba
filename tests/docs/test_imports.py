# SPDX-License-Identifier: Apache-2.0
"""What our modules import is declared: in setup.py, and in debian/control of the package that has them."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]
# The modules of each package of ours.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "infranetes": ("infranetes", "twisted/plugins/infranetes_plugin.py"),
    "infranetes-common": ("infranetes_common", "txgrpc"),
    "infranetes-simulation": ("infranetes_simulation",),
    "vmserver": ("vmserver", "twisted/plugins/vmserver_plugin.py"),
}
OWN = {"infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver"}
# What a module belongs to: the name in setup.py, and Debian's package. "": Debian has none.
KNOWN: Mapping[str, tuple[str, str]] = {
    "OpenSSL": ("pyOpenSSL", "python3-openssl"),
    "attrs": ("attrs", "python3-attr"),
    "botocore": ("botocore", "python3-botocore"),
    "cattrs": ("cattrs", "python3-cattr"),
    "cryptography": ("cryptography", "python3-cryptography"),
    "google": ("protobuf", "python3-protobuf"),
    "h11": ("h11", "python3-h11"),
    "h2": ("h2", "python3-h2"),
    "hpack": ("hpack", "python3-hpack"),
    "hyperframe": ("hyperframe", "python3-hyperframe"),
    "jeepney": ("jeepney", "python3-jeepney"),
    "libcloud": ("apache-libcloud", "python3-libcloud"),
    "opentelemetry": ("opentelemetry-sdk", ""),
    "prometheus_client": ("prometheus-client", "python3-prometheus-client"),
    "pycdlib": ("pycdlib", "python3-pycdlib"),
    "pyVim": ("pyvmomi", "python3-pyvmomi"),
    "pyVmomi": ("pyvmomi", "python3-pyvmomi"),
    "requests": ("requests", "python3-requests"),
    "treq": ("treq", "python3-treq"),
    "twisted": ("Twisted", "python3-twisted"),
    "wsproto": ("wsproto", "python3-wsproto"),
    "yaml": ("PyYAML", "python3-yaml"),
    "zope": ("zope.interface", "python3-zope.interface"),
    "zstandard": ("zstandard", "python3-zstandard"),
}
# Only for who wants it.
OPTIONAL = {"apache-libcloud", "botocore", "opentelemetry-sdk", "pyvmomi", "requests"}
# Imported by Twisted, which does without, and then checks no certificate's name.
IMPORTED_BY_OTHERS = ("service-identity", "python3-service-identity")
OF_CONCH = "python3-bcrypt"  # not a dependency of each of Debian's Twisted


@functools.cache
def imported(package: str) -> Mapping[str, str]:
    """Return the modules of others that a package's modules import, each with one that does."""
    found: dict[str, str] = {}
    for each in PACKAGES[package]:
        path = TREE / each
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            for name in _names(ast.parse(file.read_text())):
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in OWN:
                    found.setdefault(top, str(file.relative_to(TREE)))
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def in_setup() -> tuple[set[str], set[str]]:
    """Return the names of what setup.py always requires, and of what it does for optional parts of nodes."""
    values = {
        target.id: node.value
        for node in ast.parse((TREE / "setup.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    extras = values["EXTRAS"]
    assert isinstance(extras, ast.Dict)
    of_nodes = [
        value
        for key, value in zip(extras.keys, extras.values, strict=True)
        if isinstance(key, ast.Constant) and key.value not in ("test", "lint", "bench")
    ]
    return _required(values["REQUIRES"]), _required(*of_nodes, values["TRACING"], values["LIBCLOUD"])


def _required(*values: ast.expr) -> set[str]:
    constants = (node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
    return {re.split(r"[\[><=]", str(words))[0] for words in constants}


def in_control(package: str, *fields: str) -> set[str]:
    """Return what fields of debian/control name for a package."""
    paragraphs = (TREE / "debian/control").read_text().split("\n\n")
    (paragraph,) = (each for each in paragraphs if each.startswith(f"Package: {package}\n"))
    lists = (re.search(rf"^{field}:\n((?: .*\n?)+)", paragraph, flags=re.M) for field in fields)
    entries = (entry for listed in lists if listed for entry in listed[1].split(","))
    return {re.split(r"[\s(|]", entry.strip())[0] for entry in entries}


class ImportTests(SynchronousTestCase):
    def test_setup_py_requires_what_is_imported_and_nothing_else(self) -> None:
        required, extra = in_setup()
        used = set()
        for package in PACKAGES:
            for module, file in imported(package).items():
                self.assertIn(module, KNOWN, file)
                name = KNOWN[module][0]
                used.add(name)
                self.assertIn(name, extra if name in OPTIONAL else required, file)
        self.assertEqual(required - used, {IMPORTED_BY_OTHERS[0]})
        self.assertEqual(extra - used, {"opentelemetry-exporter-otlp-proto-http"})  # in the same module

    def test_each_package_depends_on_what_its_modules_import(self) -> None:
        for package in PACKAGES:
            always = in_control(package, "Depends")
            perhaps = in_control(package, "Depends", "Recommends", "Suggests")
            for module, file in imported(package).items():
                name, of_debian = KNOWN[module]
                if of_debian:
                    self.assertIn(of_debian, perhaps if name in OPTIONAL else always, f"{package}: {file}")

    def test_and_on_no_library_that_they_do_not(self) -> None:
        for package in PACKAGES:
            declared = {name for name in in_control(package, "Depends") if name.startswith("python3-")}
            used = {KNOWN[module][1] for module in imported(package)}
            self.assertLessEqual(declared - used, {IMPORTED_BY_OTHERS[1], OF_CONCH}, package)
