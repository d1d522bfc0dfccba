"""Which volume a mount of the CRI is."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from typing import Any

import attrs

from infranetes.volumes.places import MountTable, Places, outermost_writable
from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.volumes import PREFIX

MAX_PATH = 4096

# As kubelet lays a pod's own directories, which nobody outside the pod mounts anything in.
_EMPTY_DIR = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~empty-dir/[^/]")
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
    """What is mounted can be had in a VM. :raise InvalidArgument: it can't; names the mount."""
    for index, mount in enumerate(mounts):
        named = words(index, mount)
        if "\0" in mount.container_path or not mount.container_path.startswith("/"):
            raise InvalidArgument(f"{named}: container_path has to be an absolute path")
        if mount.uidMappings or mount.gidMappings:
            raise InvalidArgument(f"{named}: mounts with mapped ids are not offered")
        if mount.HasField("image"):
            _check_image(named, mount)
        else:
            _check_path(named, mount)


def _check_image(named: str, mount: Any) -> None:
    path = mount.image_sub_path
    if not mount.image.image:
        raise InvalidArgument(f"{named}: image.image is empty: name the image that is to be the volume")
    if mount.host_path:
        raise InvalidArgument(f"{named}: a mount is of an image or of a host_path, not of both")
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or len(path) > MAX_PATH:
        raise InvalidArgument(f"{named}: image_sub_path has to be a path within the image, without '..'")
    if mount.propagation != cri.PROPAGATION_PRIVATE:
        raise InvalidArgument(f"{named}: no mount can be made in an image; leave the propagation out")


def _check_path(named: str, mount: Any) -> None:
    path = mount.host_path
    if not path.startswith("/") or "\0" in path or len(path) > MAX_PATH:
        raise InvalidArgument(f"{named}: host_path has to be an absolute path")
    if mount.image_sub_path:
        raise InvalidArgument(f"{named}: image_sub_path is for mounts of images")
    if mount.propagation in _PROPAGATION and not _EMPTY_DIR.search(path):
        raise InvalidArgument(
            f"{named}: propagation {_PROPAGATION[mount.propagation]}: the VM has a copy of the node's "
            "files, so no mount made on one side can appear on the other; leave the propagation out. Between "
            "the containers of a pod mounts propagate in an emptyDir"
        )
    if mount.recursive_read_only and not mount.readonly:
        raise InvalidArgument(f"{named}: recursive_read_only needs readonly")
    if mount.recursive_read_only and mount.propagation in _PROPAGATION:
        raise InvalidArgument(f"{named}: recursive_read_only needs propagation PRIVATE")


def find(mount: Any, table: MountTable) -> Source:
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
    return Source(path, stat.S_ISREG(found.st_mode), table.kind(found.st_dev) in _IN_MEMORY)


def below(mount: Any, source: Source, places: Places) -> list[Any]:
    """What a mount that is read-only, and not all the way down, has to have beside it: mounts of the file
    systems that were mounted below on the node, which stay writable. Blocks."""
    if not mount.readonly or mount.recursive_read_only:
        return []
    found = []
    for path in map(os.fsdecode, outermost_writable(places)):
        host_path = os.path.join(source.path, path)
        if os.path.isdir(host_path) or os.path.isfile(host_path):
            container_path = os.path.join(mount.container_path, path)
            found.append(cri.Mount(container_path=container_path, host_path=host_path))
    return found


def carried(config: cri.ContainerConfig, sources: dict[int, Source]) -> cri.ContainerConfig:
    """`config` as the agent gets it: its mounts, but those of images, name volumes.

    A volume is one tree of its own, so mounted read-only it is that all the way down, and labels for
    SELinux are the VM's to give."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    for index, mount in enumerate(sent.mounts):
        if index in sources:
            mount.host_path = PREFIX + sources[index].id
        mount.recursive_read_only = False
        mount.selinux_relabel = False
    return sent
