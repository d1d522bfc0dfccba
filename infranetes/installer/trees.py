# SPDX-License-Identifier: Apache-2.0
"""The trees in /opt/infranetes: brought from the image, linked, pruned; and a guest image."""

from __future__ import annotations

import compileall
import contextlib
import gzip
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infranetes.installer import layout, record
from infranetes.installer.node import Files
from infranetes_common.errors import FailedPrecondition, ResourceExhausted

COMPRESSED = ".gz"
"""What the names of files of a guest image end with that are brought compressed."""
_PARTIAL = ".partial"
_TEMPLATES = "usr/share/infranetes"
_NEEDED_BYTES = 512 << 20
_CHUNK = 1 << 20


class Trees:
    """The trees of a node.

    :param source: the tree of the image that runs. :param guest: a directory with a guest image, or with
    none.
    :param processes: returns the paths of what the node's processes execute and map.
    """

    def __init__(
        self, files: Files, source: Path, guest: Path, processes: Callable[[], Collection[str]]
    ) -> None:
        if not layout.is_tree(source.name):
            raise FailedPrecondition(
                f"{source} is no tree of an image that installs: its name can't be a release's"
            )
        self.name = source.name
        self._files = files
        self._source = source
        self._guest = guest
        self._processes = processes
        self._home = files.path(layout.HOME)

    def templates(self) -> Mapping[str, str]:
        """Return the texts of which the node's files are made."""
        return {path.name: path.read_text() for path in (self._source / _TEMPLATES).iterdir()}

    def is_there(self, name: str) -> bool:
        """Return whether the node has a whole tree."""
        return layout.is_tree(name) and (self._home / name).is_dir()

    def bring(self) -> None:
        """Copy the image's tree to the node, unless it is there whole. Its modules are compiled there.

        :raise ResourceExhausted: it has no room."""
        target = self._home / self.name
        if target.is_dir():
            return
        free = shutil.disk_usage(self._home).free
        if free < _NEEDED_BYTES:
            raise ResourceExhausted(
                f"{layout.HOME} has {free >> 20} MiB of free space, and a release takes up to "
                f"{_NEEDED_BYTES >> 20}"
            )
        with _whole(target) as partial:
            shutil.copytree(self._source, partial, symlinks=True)
            inside = f"{layout.tree(self.name)}/usr/lib"
            compileall.compile_dir(partial / "usr/lib", quiet=2, ddir=inside, force=True)

    def bring_guest_image(self) -> None:
        """Copy the image's guest image to the node, and use it from now on.

        VMs keep the one that they have."""
        with contextlib.suppress(FileNotFoundError):
            for source in sorted(self._guest.iterdir()):
                images = self._files.path(f"{layout.STATE[0]}/guest")
                target = images / source.name
                if not target.exists():
                    images.mkdir(parents=True, exist_ok=True)
                    with _whole(target) as partial:
                        partial.mkdir()
                        for file in source.iterdir():
                            _copy_sparsely(file, partial / file.name.removesuffix(COMPRESSED))
                _link(images / "current", source.name)

    def link_current(self, name: str) -> None:
        """Have `current` lead to a tree."""
        _link(self._home / "current", name)

    def prune(self, kept: Collection[str]) -> None:
        """Remove trees that are not to be kept and that no process uses: VMs run on with theirs."""
        for path in self._others(kept):
            used = f"{layout.tree(path.name)}/"
            if path.name.endswith(_PARTIAL) or not any(each.startswith(used) for each in self._processes()):
                shutil.rmtree(path)

    def remove_all(self) -> None:
        """Remove all trees, and the link."""
        (self._home / "current").unlink(missing_ok=True)
        for path in self._others(()):
            shutil.rmtree(path)

    def _others(self, kept: Collection[str]) -> Iterator[Path]:
        for path in sorted(self._home.iterdir()):
            name = path.name.lstrip(".").removesuffix(_PARTIAL)
            ours = path.is_dir() and not path.is_symlink() and layout.is_tree(name)
            if ours and path.name not in kept and path.name != record.FILE:
                yield path

    def remove_state(self) -> str:
        """Remove the daemon's records, templates and images; return what stays, as it has volumes; "":
        nothing.

        :raise FailedPrecondition: something is mounted there."""
        stays = ""
        mounts = _mounted(self._files.root)
        for name in layout.STATE:
            path = self._files.path(name)
            if inside := [each for each in mounts if each.startswith(f"{path}/")]:
                raise FailedPrecondition(
                    f"{inside[0]} is mounted in {name}: unmount it, and the removal goes on"
                )
            volumes = path / "qemu" / "volumes"
            if volumes.is_dir() and any(volumes.iterdir()):
                stays = f"{name}/qemu/volumes"
                _remove_but(path, volumes)
            elif path.exists():
                shutil.rmtree(path)
        return stays


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield the path of a directory to be made, which becomes `target` when it is whole, and else goes."""
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        os.sync()
        partial.rename(target)
    except OSError:  # such as a full disk, which is not to stay full
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_but(top: Path, kept: Path) -> None:
    for path in top.iterdir():
        if path == kept:
            continue
        if path in kept.parents:
            _remove_but(path, kept)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _mounted(root: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines]


def _link(path: Path, target: str) -> None:
    if path.is_symlink() and os.readlink(path) == target:
        return
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(path)


def _copy_sparsely(source: Path, target: Path) -> None:
    """Copy a file, or what is compressed in it; blocks of zeros take no space."""
    compressed = source.name.endswith(COMPRESSED)
    with gzip.open(source) if compressed else source.open("rb") as old, target.open("wb") as new:
        while data := old.read(_CHUNK):
            if data.count(0) == len(data):
                new.seek(len(data), os.SEEK_CUR)
            else:
                new.write(data)
        new.truncate()
    target.chmod(0o644)
