# SPDX-License-Identifier: Apache-2.0
"""The tree that a node of any distribution has in /opt/infranetes: the daemon, and all that it needs.

Its programs are Debian's, with the loader and the libraries of the tree (`debian.py`). So none uses a library
of the node, and the tree works wherever the kernel does. They have its path in them, and so its directory is
named by what is in it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from delivery import debian, recipe

TREE = Path(__file__).resolve().parents[1]
_NFT = "usr/libexec/nft"
_SITE = "usr/lib/python3/dist-packages"
# twistd, without a script whose first line names another Python.
_PROGRAM = "#!{python} -I\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"
# Every program in Python begins with it. The node's OpenSSL may be of another release, whose modules and
# settings are no use to this one.
_SITE_CUSTOMIZE = """\
# SPDX-License-Identifier: Apache-2.0
import os
os.environ.setdefault("INFRANETES_PROGRAMS", "{home}/usr/bin")
os.environ.setdefault("OPENSSL_MODULES", "{home}/usr/lib/x86_64-linux-gnu/ossl-modules")
os.environ.setdefault("OPENSSL_CONF", "/dev/null")
"""
# Of which the installer makes the node's units.
_TEMPLATES = ("debian/infranetes.service", "docs/systemd-cni.conf", "docs/systemd-csi.conf")
_PROGRAMS = {
    "twistd": ("twisted.scripts.twistd", "run"),
    "infranetes-ctl": ("infranetes.ctl.__main__", "main"),
    "infranetes-guest": ("infranetes.publish.command", "main"),
    "infranetes-flexvolume": ("infranetes.flexvolume.cli", "main"),
}


def packages() -> list[str]:
    """Return the names of the tree's Debian packages, without those that apt adds for them."""
    paragraphs = (TREE / "debian/control").read_text().split("\n\n")
    found = set(recipe.PROGRAM_PACKAGES)
    for name in ("infranetes", "infranetes-common"):
        (paragraph,) = (each for each in paragraphs if each.startswith(f"Package: {name}\n"))
        listed = re.search(r"^Depends:\n((?: .*\n?)+)", paragraph, flags=re.M)
        assert listed is not None
        entries = {re.split(r"[\s(]", entry.strip())[0] for entry in listed[1].split(",")}
        found |= {entry for entry in entries if entry and not entry.startswith(("$", "infranetes"))}
    return sorted(found)


def unpacked(work: Path) -> tuple[Path, Path, dict[str, str]]:
    """Unpack all packages of the tree below a directory, and return where they are: those of the tree's own
    release, and of the one that its newer nft is of; and each one's version."""
    own, newer = work / "root", work / "newer"
    versions = debian.unpacked(own, recipe.RELEASE, packages())
    of_nft = debian.unpacked(newer, recipe.NEWER_RELEASE, ("nftables",))
    return own, newer, versions | {f"{recipe.NEWER_RELEASE}/{name}": each for name, each in of_nft.items()}


class Tree:
    """A node's tree that is being made, in a directory that stands for the node's root.

    :param root: the unpacked packages. :param newer: those of the release that has a newer nft.
    """

    def __init__(self, scratch: Path, root: Path, newer: Path, id: str) -> None:
        self.home = f"{recipe.HOME}/{id}"
        self.path = scratch / self.home.lstrip("/")
        self._root = root
        self._own = debian.Part(self.path, self.home, root, debian.LIBRARIES)
        self._newer = debian.Part(self.path, self.home, newer, f"{_NFT}/newer")

    def make(self, wheels: list[Path]) -> None:
        """Bring everything into it."""
        self.path.mkdir(parents=True)
        self._bring_debian()
        for wheel in wheels:
            with ZipFile(wheel) as archive:
                archive.extractall(self.path / _SITE)
        (self.path / "usr/bin/python3").symlink_to("python3.11")
        customize = self.path / "usr/lib/python3.11/sitecustomize.py"
        customize.write_text(_SITE_CUSTOMIZE.format(home=self.home))
        share = self.path / "usr/share/infranetes"
        share.mkdir(parents=True)
        for source in _TEMPLATES:
            shutil.copyfile(TREE / source, share / Path(source).name)
        for name, (module, function) in _PROGRAMS.items():
            text = _PROGRAM.format(python=f"{self.home}/usr/bin/python3", module=module, name=function)
            (self.path / "usr/bin" / name).write_text(text)
        (self.path / "usr/bin/nft").write_text(nft(self.home))
        self._plain()

    def _bring_debian(self) -> None:
        """Copy what is Debian's, and have its programs use nothing else."""
        for name in recipe.PROGRAMS:
            self._own.add_program(name, f"usr/bin/{name}")
        self._own.add_program("nft", f"{_NFT}/older/nft")
        for directory in recipe.DIRECTORIES:
            for relative in self._files(directory):
                self._own.add(self._root / "usr" / relative, f"usr/{relative}")
        for name in recipe.QEMU_MODULES:
            module = f"{debian.LIBRARIES}/qemu/{name}"
            self._own.add(self._root / module, module)
        self._newer.add_program("nft", f"{_NFT}/newer/nft")
        for part in (self._own, self._newer):
            part.relocate()

    def _files(self, directory: str) -> Iterator[str]:
        base = self._root / "usr"
        for path in sorted((base / directory).rglob("*")):
            relative = str(path.relative_to(base))
            if path.is_dir() or path.suffix in recipe.EXCLUDED_SUFFIXES:
                continue
            if not any(fnmatch.fnmatch(relative, pattern) for pattern in recipe.EXCLUDED):
                yield relative

    def _plain(self) -> None:
        """Give all files modes that say no more than whether they are programs."""
        for path in self.path.rglob("*"):
            if not path.is_symlink():
                program = path.parent == self.path / "usr/bin" or path.name in (debian.LOADER, "nft")
                program |= path.is_dir()
                path.chmod(0o755 if program else 0o644)


def nft(home: str) -> str:
    """Return the tree's program nft. :param home: the tree's path."""
    return (Path(__file__).parent / "nft.sh").read_text().replace("@HOME@", home)


def identity(versions: dict[str, str], wheels: list[Path], version: str) -> str:
    """Return the name of a tree's directory: the release, and a digest of all that goes into it."""
    summed = hashlib.sha256()
    for name, each in sorted(versions.items()):
        summed.update(f"{name} {each}\n".encode())
    for path in [*sorted(wheels), *sorted(Path(__file__).parent.glob("*.[ps][yh]"))]:
        summed.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{version}-{summed.hexdigest()[:12]}"
