# SPDX-License-Identifier: Apache-2.0
"""A kernel's modules, and what a small system needs to find and load some of them."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from tests.guests import cpio

_INFO = re.compile(rb"(?<=\0)(depends|alias)=([^\0]*)(?=\0)")


@attrs.frozen
class Module:
    """A module. :ivar needs: the names of others. :ivar aliases: of devices, and what else asks for it."""

    path: str
    data: bytes
    needs: tuple[str, ...]
    aliases: tuple[str, ...]


def _module(root: Path, file: Path) -> Module:
    data = file.read_bytes()
    if file.suffix == ".xz":
        data = lzma.decompress(data)
    words: dict[bytes, list[str]] = {b"depends": [], b"alias": []}
    for key, value in _INFO.findall(data):
        words[key].append(value.decode())
    needs = tuple(name.replace("-", "_") for each in words[b"depends"] for name in each.split(",") if name)
    return Module(str(file.relative_to(root)).removesuffix(".xz"), data, needs, tuple(words[b"alias"]))


def find(directory: Path, wanted: Iterable[str]) -> Mapping[str, Module]:
    """Return modules, and those that they need, by name.

    :param directory: of one kernel, below /lib/modules. What is built into the kernel is left out.
    :raise LookupError: the kernel has no such module.
    """
    files = {each.name.partition(".ko")[0].replace("-", "_"): each for each in directory.rglob("*.ko*")}
    built_in = (directory / "modules.builtin").read_text().splitlines()
    present = {Path(each).name.removesuffix(".ko").replace("-", "_") for each in built_in}
    found: dict[str, Module] = {}
    waiting = [name.replace("-", "_") for name in wanted]
    while waiting:
        name = waiting.pop()
        if name in found or name in present:
            continue
        if name not in files:
            raise LookupError(f"{directory.name} has no module {name}")
        found[name] = _module(directory, files[name])
        waiting += found[name].needs
    return found


def entries(release: str, modules: Mapping[str, Module]) -> Iterator[cpio.Entry]:
    """Yield the files of modules, and the tables by which `modprobe` loads them."""
    root = f"lib/modules/{release}"
    dependencies, aliases = [], []
    for name, module in sorted(modules.items()):
        yield cpio.file(f"{root}/{module.path}", module.data)
        needed = [modules[each].path for each in _needed(name, modules)]
        dependencies.append(f"{module.path}: {' '.join(needed)}".rstrip())
        aliases += [f"alias {alias} {name}" for alias in module.aliases]
    yield cpio.file(f"{root}/modules.dep", "\n".join(dependencies) + "\n")
    yield cpio.file(f"{root}/modules.alias", "\n".join(aliases) + "\n")


def _needed(name: str, modules: Mapping[str, Module]) -> list[str]:
    """Return the names of all that a module needs; what is needed by one comes after it."""
    found: dict[str, None] = {}
    waiting = list(modules[name].needs)
    while waiting:
        each = waiting.pop(0)
        if each in modules:
            found.pop(each, None)  # again, after whoever needs it
            found[each] = None
            waiting += modules[each].needs
    return list(found)
