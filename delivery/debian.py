# SPDX-License-Identifier: Apache-2.0
"""Packages of a release of Debian, unpacked, and programs of them that need nothing else of any system.

Such programs are changed in two places by patchelf: the loader that they name and where it looks for
libraries are in a directory of the tree. Both are absolute, as the kernel takes no other loader.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from delivery import elf
from infranetes.guest.sources import of_release
from infranetes_common.concurrency import replace_file

LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"
_SEARCHED = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "lib64")
_BINARIES = ("usr/bin", "bin", "usr/sbin", "sbin")


def unpacked(root: Path, release: str, packages: Sequence[str]) -> dict[str, str]:
    """Have apt unpack packages and what they need, without their scripts; return each one's version."""
    versions, wanted = root.with_suffix(".versions"), root.with_suffix(".packages")
    listed = "".join(f"{name}\n" for name in packages)
    if not versions.exists() or not wanted.exists() or wanted.read_text() != listed:
        versions.unlink(missing_ok=True)
        wanted.unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        sources = of_release(release)
        for suffix, lines in ((".list", sources.lines), (".conf", sources.settings)):
            root.with_suffix(suffix).write_text("".join(f"{line}\n" for line in lines))
        command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=extract"]
        options = [f"--aptopt={root.with_suffix('.conf')}", '--aptopt=Acquire::Languages "none"']
        chosen = (f"--include={','.join(packages)}", "--skip=cleanup/apt/cache")
        subprocess.run([*command, *options, *chosen, release, root, root.with_suffix(".list")], check=True)
        debs = sorted((root / "var/cache/apt/archives").glob("*.deb"))
        told = [
            subprocess.run(["dpkg-deb", "-W", deb], check=True, capture_output=True).stdout for deb in debs
        ]
        if not told:
            raise SystemExit(f"mmdebstrap has left no packages in {root}")
        shutil.rmtree(root / "var")
        replace_file(wanted, listed, 0o644)
        replace_file(versions, b"".join(told), 0o644)
    return dict(line.split("\t")[:2] for line in versions.read_text().splitlines())


class Part:
    """What a tree has of one release of Debian, whose loader and libraries are in one directory.

    :param tree: the directory that becomes the tree. :param home: the tree's path on a node.
    :param root: the unpacked packages. :param libraries: the directory, in the tree.
    """

    def __init__(self, tree: Path, home: str, root: Path, libraries: str) -> None:
        self._tree = tree
        self._home = home
        self._root = root
        self._directory = libraries
        self._libraries: set[str] = set()
        self._programs: list[Path] = []

    def add_program(self, name: str, target: str) -> None:
        """Copy a program, and the libraries that it needs."""
        self.add(self._find(name, _BINARIES), target)
        self._programs.append(self._tree / target)

    def add(self, source: Path, target: str) -> None:
        """Copy a file, and the libraries that it needs."""
        real = self._real(source)
        if not real.is_file():
            return  # a link to what is not installed
        destination = self._tree / target
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real, destination)
        shutil.copymode(real, destination)
        found = elf.read(real)
        for name in found.needed if found else ():
            if name not in self._libraries and name != LOADER:
                self._libraries.add(name)
                self.add(self._find(name, _SEARCHED), f"{self._directory}/{name}")

    def relocate(self) -> None:
        """Have each program name a loader in the tree, which looks for libraries beside it first."""
        self.add(self._find(LOADER, _SEARCHED), f"{self._directory}/{LOADER}")
        libraries = f"{self._home}/{self._directory}"
        for path in self._programs:
            found = elf.read(path)
            if found is not None and found.interpreter:
                command = ["patchelf", "--set-interpreter", f"{libraries}/{LOADER}", "--force-rpath"]
                subprocess.run([*command, "--set-rpath", libraries, path], check=True)

    def _find(self, name: str, places: tuple[str, ...]) -> Path:
        for place in places:
            path = self._root / place / name
            if path.is_file() or path.is_symlink():
                return self._real(path)
        raise SystemExit(f"Debian's packages have no {name} in {', '.join(places)}")

    def _real(self, path: Path) -> Path:
        """Follow symbolic links, of which absolute ones are below the unpacked root."""
        while path.is_symlink():
            target = os.readlink(path)
            path = self._root / target.lstrip("/") if target.startswith("/") else path.parent / target
        return path
