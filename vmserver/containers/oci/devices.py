# SPDX-License-Identifier: Apache-2.0
"""The devices of a container, which are those of its VM."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Iterator

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import device_checks
from vmserver.containers.oci.limits import Spec

MAX_DEVICES = 4096
MAX_FILES = 65536  # the most files that are looked at

# Entries of /dev that belong to the processes using them, not to the VM. A container has its own.
_OWN = frozenset(f"/dev/{name}" for name in ("pts", "shm", "fd", "mqueue", "console", "ptmx", "core"))


@attrs.frozen
class Node:
    """A device's file in a container, and the permitted access to it (of r, w and m).

    :ivar source: its file in the VM."""

    path: str
    block: bool
    major: int
    minor: int
    mode: int
    uid: int
    gid: int
    access: str = "rwm"
    source: str = ""

    def device(self) -> Spec:
        """Return the entry of `linux.devices`."""
        return {
            "path": self.path,
            "type": "b" if self.block else "c",
            "major": self.major,
            "minor": self.minor,
            "fileMode": self.mode,
            "uid": self.uid,
            "gid": self.gid,
        }

    def rule(self) -> Spec:
        """Return the entry of `linux.resources.devices`."""
        kind = "b" if self.block else "c"
        return {"allow": True, "type": kind, "major": self.major, "minor": self.minor, "access": self.access}


def find_devices(cri_devices: Iterable[cri.Device], privileged: bool) -> tuple[Node, ...]:
    """Return the wanted devices, and all of the VM's for a privileged container. Blocks.

    A directory stands for the devices in it.

    :raise InvalidArgument: the VM lacks one, the permissions are invalid, or there are too many.
    """
    files = iter(range(MAX_FILES))  # a counter
    found = {node.path: node for node in (_below("/dev", "/dev", "rwm", files) if privileged else ())}
    for device in cri_devices:
        found.update((node.path, node) for node in _wanted(device, files))
    if len(found) > MAX_DEVICES:
        raise InvalidArgument(f"config.devices: more than {MAX_DEVICES}")
    return tuple(found.values())


def _wanted(device: cri.Device, files: Iterator[int]) -> list[Node]:
    inside = device.container_path or device.host_path
    permissions = device_checks.permissions(device)
    path = posixpath.normpath(inside).replace("//", "/")
    if not path.startswith("/") or path == "/" or "\0" in inside + device.host_path:
        raise InvalidArgument(f"config.devices {inside[:200]!r}: container_path has to be absolute, below /")
    nodes: list[Node] = []
    if device.host_path.startswith("/"):
        access = "".join(letter for letter in "rwm" if letter in permissions)
        nodes = list(_below(device.host_path, path, access, files))
    if not nodes:
        raise device_checks.missing(device)
    return nodes


def _below(path: str, inside: str, access: str, files: Iterator[int]) -> Iterator[Node]:
    """Yield the device at `path`, or the devices below it. Only a link at `path` itself is followed."""
    try:
        found = os.stat(path)
        names = sorted(os.listdir(path)) if stat.S_ISDIR(found.st_mode) else None
    except OSError:
        return
    if names is None:
        if node := _node(found, inside, access, path):
            yield node
        return
    for name in names:
        if next(files, None) is None:
            raise InvalidArgument(f"config.devices: over {MAX_FILES} files are where devices should be")
        below = posixpath.join(path, name)
        if below not in _OWN and not os.path.islink(below):
            yield from _below(below, posixpath.join(inside, name), access, files)


def _node(found: os.stat_result, inside: str, access: str, source: str) -> Node | None:
    block = stat.S_ISBLK(found.st_mode)
    if not block and not stat.S_ISCHR(found.st_mode):
        return None
    return Node(
        path=inside,
        block=block,
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        access=access,
        source=source,
    )
