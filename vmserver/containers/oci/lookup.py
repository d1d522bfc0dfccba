# SPDX-License-Identifier: Apache-2.0
"""Lookups in the VM and in the container's root that its OCI specification depends on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import accounts, mount_checks
from vmserver.containers.accounts import MAX_FILE_BYTES, Accounts, ProcessUser
from vmserver.containers.oci.devices import Node, find_devices
from vmserver.containers.oci.image import ImageDefaults, image_volumes
from vmserver.containers.oci.rootfs_paths import read_within, resolved
from vmserver.containers.security import refuse

_MOUNTS = Path("/proc/self/mountinfo")
_CLOSED = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC}
_KERNELS = ("/proc/", "/sys/", "/dev/")
_SHARED, _SLAVE = "shared:", "master:"

# Files in /proc that may be mounted over, as with runc: they only describe the machine.
_IN_PROC = frozenset(
    f"/proc/{name}"
    for name in ("cpuinfo", "diskstats", "loadavg", "meminfo", "slabinfo", "stat", "swaps", "uptime")
)


@attrs.frozen
class Source:
    """The source of a mount.

    :ivar closed: the restrictions of its file system, as options of mount(8), which crun would lift."""

    path: str
    directory: bool = True
    closed: tuple[str, ...] = ()


@attrs.frozen
class Lookup:
    """The results of the lookups. `mounts` are the sources of the configuration's mounts, in their order."""

    user: ProcessUser = attrs.field(factory=ProcessUser)
    hostname: str = ""
    mounts: tuple[Source, ...] = ()
    files: Mapping[str, str] = MappingProxyType({})  # the sandbox's own files, by their path in the container
    devices: tuple[Node, ...] = ()
    targets: Mapping[str, str] = MappingProxyType({})  # of mounts whose path in the root leads nowhere
    volumes: tuple[str, ...] = ()  # the paths in the root that the image wants as volumes


def look_up(
    config: cri.ContainerConfig,
    image: ImageDefaults,
    rootfs: Path,
    files: Mapping[str, Path],
    image_paths: Mapping[int, str] = MappingProxyType({}),
    mountinfo: Path = _MOUNTS,
) -> Lookup:
    """Look up everything that `config` names. Blocks: reads files and directories.

    :param rootfs: the container's root, which nobody changes meanwhile.
    :param files: the sandbox's own files by their path in a container; missing ones are left out.
    :param image_paths: the paths of image volumes by their index among the mounts.
    :raise InvalidArgument: something is missing or malformed; names the field.
    """
    refuse(bool(config.CDI_devices), "config.CDI_devices", "a CDI device")
    context = config.linux.security_context
    present = {target: str(file) for target, file in sorted(files.items()) if file.exists()}
    volumes = tuple(_in_root(rootfs, image_volumes(config, image)))
    paths = [*map(mount_checks.target, config.mounts), *present, *volumes]
    return Lookup(
        user=_user(context, image, rootfs),
        hostname=os.uname().nodename,
        mounts=tuple(_sources(config.mounts, image_paths, mountinfo)),
        files=present,
        devices=find_devices(config.devices, context.privileged),
        targets=_targets(rootfs, paths),
        volumes=volumes,
    )


def _user(context: cri.LinuxContainerSecurityContext, image: ImageDefaults, rootfs: Path) -> ProcessUser:
    accounts.check(context)
    passwd, group = (read_within(rootfs, f"/etc/{name}", MAX_FILE_BYTES) for name in ("passwd", "group"))
    return accounts.resolve(context, Accounts(passwd, group, image.user))


def _in_root(rootfs: Path, volumes: Iterable[str]) -> Iterable[str]:
    """Yield the image's volumes, but none in the file systems that the kernel makes, which hide them."""
    for path in volumes:
        place = f"{resolved(rootfs, path)[0]}/"
        if not place.startswith(_KERNELS):
            yield path


def _targets(rootfs: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the real places of mount points that crun can't make because a link of the image is dangling.

    :raise InvalidArgument: one is in /proc, whose files are the kernel's."""
    found = {}
    for path in paths:
        place, dangling = resolved(rootfs, path)
        if place.startswith("/proc/") and place not in _IN_PROC:
            raise InvalidArgument(f"config.mounts {path[:200]!r}: nothing can be mounted at {place[:200]!r}")
        if dangling:
            found[path] = place
    return found


def _sources(wanted: Iterable[cri.Mount], images: Mapping[int, str], mountinfo: Path) -> Iterable[Source]:
    text = ""
    for index, mount in enumerate(wanted):
        if mount.HasField("image"):
            path = images[index]
        else:
            path = mount_checks.source(mount, os.path.exists)
            if mount.propagation != cri.PROPAGATION_PRIVATE:
                text = text or os.fsdecode(mountinfo.read_bytes())
                _check_propagation(mount, text)
        flags = os.statvfs(path).f_flag
        closed = tuple(option for option, flag in _CLOSED.items() if flags & flag)
        yield Source(path, stat.S_ISDIR(os.stat(path).st_mode), closed)


def _check_propagation(mount: cri.Mount, mountinfo: str) -> None:
    """Check that mounts can propagate to the container. :raise InvalidArgument: the source's do not."""
    marks = _propagation(os.path.realpath(mount.host_path), mountinfo)
    both_ways = mount.propagation == cri.PROPAGATION_BIDIRECTIONAL
    if not any(mark.startswith(_SHARED if both_ways else (_SHARED, _SLAVE)) for mark in marks):
        raise InvalidArgument(
            f"{mount_checks.field(mount)}: {mount.host_path[:200]!r} is on a private mount of the VM, so "
            "mounts don't propagate; use PROPAGATION_PRIVATE"
        )


def _propagation(path: str, mountinfo: str) -> list[str]:
    """Return the optional fields of the mount that has `path`: proc(5)."""
    best, marks = "", list[str]()
    for line in mountinfo.split("\n")[:-1]:  # what else ends a line elsewhere may be in a name
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, marks = point, fields[6 : fields.index("-", 6)]
    return marks
