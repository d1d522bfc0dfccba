"""Which volume a mount of the CRI is."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import attrs

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unimplemented
from infranetes_common.volumes import PREFIX

_IN_MEMORY = {"tmpfs", "ramfs"}
_PROPAGATION = {cri.PROPAGATION_HOST_TO_CONTAINER: "HOST_TO_CONTAINER",
                cri.PROPAGATION_BIDIRECTIONAL: "BIDIRECTIONAL"}  # fmt: skip


@attrs.frozen
class Source:
    """A file or directory of the node, its path without links."""

    path: str
    file: bool
    in_memory: bool

    @property
    def id(self) -> str:
        """The volume's in its sandbox."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]


def words(index: int, mount: Any) -> str:
    """A mount as messages name it."""
    source = mount.image.image if mount.HasField("image") else mount.host_path
    return f"config.mounts[{index}] ({source[:256]} at {mount.container_path[:256]})"


def check(mounts: Any) -> None:
    """What is mounted can be had in a VM. :raise InvalidArgument: it can't. :raise Unimplemented: not yet."""
    for index, mount in enumerate(mounts):
        named = words(index, mount)
        if mount.HasField("image") or mount.image_sub_path:
            raise Unimplemented(f"{named}: images as volumes are not offered")
        for field in ("host_path", "container_path"):
            path = getattr(mount, field)
            if not path.startswith("/") or "\0" in path or len(path) > 4096:
                raise InvalidArgument(f"{named}: {field} has to be an absolute path")
        if mount.propagation in _PROPAGATION:
            raise InvalidArgument(
                f"{named}: propagation {_PROPAGATION[mount.propagation]}: the VM has a copy of the node's "
                "files, so no mount made on one side can appear on the other; leave the propagation out"
            )
        if mount.uidMappings or mount.gidMappings:
            raise InvalidArgument(f"{named}: mounts with mapped ids are not offered")
        if mount.recursive_read_only and not mount.readonly:
            raise InvalidArgument(f"{named}: recursive_read_only needs readonly")


def find(mount: Any) -> Source:
    """What a mount is of; made, a directory, where there is nothing. Blocks.

    :raise InvalidArgument: a socket, device or pipe. :raise FailedPrecondition: can't be looked at."""
    path = os.path.realpath(mount.host_path)
    try:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            os.makedirs(path, 0o755, exist_ok=True)
            found = os.stat(path)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise InvalidArgument(f"{path} is a socket, device or pipe, which can't be carried into a VM")
    return Source(path, stat.S_ISREG(found.st_mode), _kind(found.st_dev) in _IN_MEMORY)


def _kind(device: int) -> str:
    """The file system's type, after proc_pid_mountinfo(5)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


def carried(config: cri.ContainerConfig, sources: list[Source]) -> cri.ContainerConfig:
    """`config` as the agent gets it: its mounts name volumes.

    A volume is one tree of its own, so mounted read-only it is that all the way down, and labels for
    SELinux are the VM's to give."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    for mount, source in zip(sent.mounts, sources, strict=True):
        mount.host_path = PREFIX + source.id
        mount.recursive_read_only = False
        mount.selinux_relabel = False
    return sent
