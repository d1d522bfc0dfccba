# SPDX-License-Identifier: Apache-2.0
"""The CRI's mounts: checked, and resolved to the volumes that they name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping

import attrs

from infranetes.volumes import published
from infranetes.volumes.mount_table import Layout, MountTable, outermost_writable
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.paths import make_directories, parent, resolve
from infranetes_common.user_namespaces import mapped_ids
from infranetes_common.wire import cri

MAX_PATH = 4096

# kubelet's path of an emptyDir, in which nothing is mounted from outside the pod.
_EMPTY_DIR = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~empty-dir/[^/]")
# kubelet's paths of volumes made from API objects. It keeps secrets on a tmpfs if it can, and configmaps on
# a disk. Neither belongs on a VM's disk, which may be someone else's.
_CONFIGURATION = re.compile(
    r"/pods/[^/]+/volumes/kubernetes\.io~(secret|configmap|projected|downward-api)/[^/]"
)
_HUGE_PAGES = "hugetlbfs"
_IN_MEMORY = {"tmpfs", "ramfs", _HUGE_PAGES}
_SIZED = {"tmpfs", _HUGE_PAGES}
# File systems whose files are the kernel's words: what is read of them is not what their sizes say.
_KERNELS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "pstore"}
    | {"efivarfs", "devpts", "mqueue", "binfmt_misc", "fusectl", "selinuxfs", "nsfs", "rpc_pipefs"}
)
_PROPAGATION = {cri.PROPAGATION_HOST_TO_CONTAINER: "HOST_TO_CONTAINER",
                cri.PROPAGATION_BIDIRECTIONAL: "BIDIRECTIONAL"}  # fmt: skip


@attrs.frozen
class Source:
    """A file or directory of the node that is mounted. Its path has no links.

    :ivar size_limit: bytes that can be written to it, of an emptyDir in memory; 0: there is no such limit.
    :ivar huge_page_size: bytes of the node's huge pages that its files are; 0: they are not."""

    path: str
    file: bool
    in_memory: bool
    size_limit: int = attrs.field(default=0, eq=False)
    huge_page_size: int = attrs.field(default=0, eq=False)

    @property
    def id(self) -> str:
        """The id of the volume in its sandbox."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]


def describe(index: int, mount: cri.Mount) -> str:
    """Return the mount as messages name it."""
    source = mount.image.image if mount.HasField("image") else mount.host_path
    return f"config.mounts[{index}] ({source[:256]} at {mount.container_path[:256]})"


def check(mounts: Iterable[cri.Mount]) -> None:
    """Check that the mounts are possible in a VM. :raise InvalidArgument: one is not; names it."""
    for index, mount in enumerate(mounts):
        named = describe(index, mount)
        if "\0" in mount.container_path or not mount.container_path.startswith("/"):
            raise InvalidArgument(f"{named}: container_path has to be an absolute path")
        mapped_ids(mount.uidMappings, mount.gidMappings, named)
        if mount.HasField("image"):
            _check_image(named, mount)
        else:
            _check_path(named, mount)


def _check_image(named: str, mount: cri.Mount) -> None:
    path = mount.image_sub_path
    if not mount.image.image:
        raise InvalidArgument(f"{named}: image.image is empty: name the image that is to be the volume")
    if mount.host_path:
        raise InvalidArgument(f"{named}: a mount is of an image or of a host_path, not of both")
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or len(path) > MAX_PATH:
        raise InvalidArgument(f"{named}: image_sub_path has to be a path within the image, without '..'")
    if mount.propagation != cri.PROPAGATION_PRIVATE:
        raise InvalidArgument(f"{named}: no mount can be made in an image; leave the propagation out")


def _check_path(named: str, mount: cri.Mount) -> None:
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


def writable_paths(mounts: Iterable[cri.Mount]) -> set[str]:
    """Return the node's paths, as the mounts name them, that a container can write to."""
    return {os.path.normpath(one.host_path) for one in mounts if one.host_path and not one.readonly}


def find_source(mount: cri.Mount, table: MountTable, confined: Collection[str] = ()) -> Source:
    """Return the source of a mount; a missing one is made, as a directory. Blocks.

    :param confined: directories that containers may write to: a link in one must not lead out of it.
    :raise InvalidArgument: a socket, device or pipe, of the kernel's file systems, or such a link.
    :raise FailedPrecondition: it can't be looked at, or it only stands for a volume that is a disk."""
    path = mount.host_path
    try:
        path = resolve(path, confined)
        if (volume := published.read(path, table)) is not None:
            raise FailedPrecondition(
                f"{path} stands for volume {volume.volume}, a disk, which can't be attached to this pod's VM"
            )
        raw = os.fsencode(path)
        try:
            status = _status(raw)
        except FileNotFoundError:
            make_directories(raw)
            status = _status(raw)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        raise FailedPrecondition(f"{path} became a link while it was looked at")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument(
            f"{path} is a socket, device or pipe, which can't be copied into a VM. For a disk, ask for a raw "
            "volume (volumeMode: Block)"
        )
    fs_type = table.fs_type(status.st_dev)
    if fs_type in _KERNELS:
        raise InvalidArgument(
            f"{path} is of the node's kernel ({fs_type}), and can't be copied into a VM, which has a kernel "
            "of its own; a pod that watches or changes its node has to run on the node itself"
        )
    in_memory = fs_type in _IN_MEMORY or _is_configuration(path, table)
    size = _file_system(path).f_bsize if fs_type == _HUGE_PAGES else 0
    limit = _size_limit(path, table) if fs_type in _SIZED else 0
    return Source(path, stat.S_ISREG(status.st_mode), in_memory, limit, size)


def _size_limit(path: str, table: MountTable) -> int:
    """The size of the file system that kubelet has mounted for an emptyDir: of a tmpfs its sizeLimit, or the
    pod's memory."""
    if not _EMPTY_DIR.search(path) or table.layout(path)[b""].path != b"/":
        return 0
    sizes = _file_system(path)
    return max(sizes.f_blocks, 0) * sizes.f_frsize


def _file_system(path: str) -> os.statvfs_result:
    try:
        return os.statvfs(path)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None


def _is_configuration(path: str, table: MountTable) -> bool:
    """Return whether the path is one of kubelet's, or mounted from one, as kubelet does for a subPath."""
    inner = os.fsdecode(table.layout(path)[b""].path)
    return any(_CONFIGURATION.search(each) for each in (path, inner))


def _status(path: bytes) -> os.stat_result:
    with parent(path) as (directory, name):
        return os.stat(name, dir_fd=directory, follow_symlinks=False)


def writable_submounts(mount: cri.Mount, source: Source, layout: Layout) -> list[cri.Mount]:
    """The mounts that go with a mount that is read-only, but not recursively: of the file systems mounted
    below it on the node, which stay writable. Blocks."""
    if not mount.readonly or mount.recursive_read_only:
        return []
    submounts = []
    for path in map(os.fsdecode, outermost_writable(layout)):
        host_path = os.path.join(source.path, path)
        with contextlib.suppress(OSError):
            kind = _status(os.fsencode(host_path)).st_mode
            if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
                continue
            container_path = os.path.join(mount.container_path, path)
            submounts.append(
                cri.Mount(
                    container_path=container_path,
                    host_path=host_path,
                    uidMappings=mount.uidMappings,
                    gidMappings=mount.gidMappings,
                )
            )
    return submounts


def for_agent(config: cri.ContainerConfig, names: Mapping[int, str]) -> cri.ContainerConfig:
    """Return `config` as the agent gets it: with mounts that name volumes, except for those of images.

    A volume is a single tree, so a read-only mount of it is recursive. SELinux labels are up to the VM.

    :param names: of the mounts' volumes, or of what is in them, by the mounts' indexes."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    for index, mount in enumerate(sent.mounts):
        if index in names:
            mount.host_path = PREFIX + names[index]
            mount.ClearField("uidMappings")  # files are carried with the ids that the pod sees
            mount.ClearField("gidMappings")
        mount.recursive_read_only = False
        mount.selinux_relabel = False
    return sent
