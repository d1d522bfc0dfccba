# SPDX-License-Identifier: Apache-2.0
"""The mounts of a container: those of every container, the configuration's, the sandbox's files.

crun makes them in their order, follows the container's symbolic links only within its root, and creates
missing mount points. Source: crun(1), "mount options"; OCI runtime-spec, config.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.user_namespaces import UserNamespace, mapped_ids
from infranetes_common.wire import cri
from vmserver.containers import mount_checks
from vmserver.containers.oci.devices import Node
from vmserver.containers.oci.limits import Spec
from vmserver.containers.oci.lookup import Lookup, Source
from vmserver.containers.security import refuse

_PROPAGATION = {
    cri.PROPAGATION_PRIVATE: "rprivate",
    cri.PROPAGATION_HOST_TO_CONTAINER: "rslave",
    cri.PROPAGATION_BIDIRECTIONAL: "rshared",
}
_TTY_GROUP = 5  # in Debian and most other distributions
_IMAGE_OPTIONS = ("ro", "nosuid", "nodev", "noexec")


def container_mounts(
    config: cri.ContainerConfig,
    lookup: Lookup,
    volumes: Mapping[str, Path],
    users: UserNamespace | None = None,
    mqueue: bool = True,
) -> tuple[list[Spec], str]:
    """Return the mounts and the propagation of the container's root; "": it is private.

    :param volumes: the directories that stand for the image's volumes, by their path in the container.
    :param users: the container's user namespace, unless it is the VM's.
    :param mqueue: whether the VM has message queues at /dev/mqueue.
    :raise InvalidArgument: a mount is malformed or not supported; names it.
    """
    context = config.linux.security_context
    own: dict[str, Spec] = {}
    for mount, source in zip(config.mounts, lookup.mounts, strict=True):
        target = mount_checks.target(mount)
        if target in own:
            raise InvalidArgument(f"{mount_checks.field(mount)}: there is another mount at this path")
        own[target] = _mount(mount, target, source, users)
    for target, directory in volumes.items():
        own.setdefault(target, _bind(str(directory), target, "rprivate"))
    read_only = ("ro",) if context.readonly_rootfs else ()
    for target, file in lookup.files.items():
        own.setdefault(target, _bind(file, target, "rprivate", *read_only))
    given = _given(context)
    if users is not None:
        given = [*_given_in_user_namespace(given, context, users, mqueue), *_devices(lookup.devices)]
    given = [
        mount for mount in given if not any(_within(str(mount["destination"]), target) for target in own)
    ]
    for target, entry in own.items():
        entry["destination"] = lookup.targets.get(target, target)
    ordered = sorted(own.values(), key=lambda mount: str(mount["destination"]).count("/"))
    wanted = {mount.propagation for mount in config.mounts}
    # Mounts propagate to a container only if its root mount is not private.
    for kind in (cri.PROPAGATION_BIDIRECTIONAL, cri.PROPAGATION_HOST_TO_CONTAINER):
        if kind in wanted:
            return given + ordered, _PROPAGATION[kind]
    return given + ordered, ""


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _mount(mount: cri.Mount, target: str, source: Source, users: UserNamespace | None) -> Spec:
    field = mount_checks.field(mount)
    # Only images are mapped here: the node brings other volumes with the ids that they have in the pod.
    if mount.HasField("image"):
        if mapped_ids(mount.uidMappings, mount.gidMappings, field) not in (None, users):
            raise InvalidArgument(f"{field}: its mappings of ids are not those of the pod")
    else:
        refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
    if mount.HasField("image"):
        return _bind(source.path, target, "rprivate", *_IMAGE_OPTIONS)
    propagation = _PROPAGATION.get(mount.propagation)
    if propagation is None:
        raise InvalidArgument(f"{field}: {mount.propagation} is not a known mount propagation")
    if not mount.recursive_read_only:
        return _bind(source.path, target, propagation, *source.closed, *(["ro"] if mount.readonly else []))
    if not mount.readonly or mount.propagation != cri.PROPAGATION_PRIVATE:
        raise InvalidArgument(
            f"{field}: recursive_read_only needs readonly and PROPAGATION_PRIVATE beside it"
        )
    # crun applies rro to directories only. A file has no mounts below it, so ro is enough.
    return _bind(source.path, target, propagation, *source.closed, "rro" if source.directory else "ro")


def _bind(source: str, target: str, propagation: str, *options: str) -> Spec:
    return {
        "destination": target,
        "type": "bind",
        "source": source,
        "options": ["rbind", propagation, *options],
    }


def _given(context: cri.LinuxContainerSecurityContext) -> list[Spec]:
    """Return the mounts that every container has."""
    changeable = [] if context.privileged else ["ro"]
    closed = ["nosuid", "noexec", "nodev"]
    if context.namespace_options.ipc == cri.CONTAINER:
        shm = _file_system("tmpfs", "/dev/shm", *closed, "mode=1777", "size=65536k", source="shm")  # noqa: S108
    else:
        shm = _bind("/dev/shm", "/dev/shm", "rprivate", *closed)  # noqa: S108
    return [
        _file_system("proc", "/proc", *closed),
        _file_system("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _file_system(
            *("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            f"gid={_TTY_GROUP}",
        ),
        _file_system("sysfs", "/sys", *closed, *changeable),
        _file_system("cgroup", "/sys/fs/cgroup", *closed, "relatime", *changeable),
        _file_system("mqueue", "/dev/mqueue", *closed),
        shm,
    ]


def _given_in_user_namespace(
    given: Sequence[Spec],
    context: cri.LinuxContainerSecurityContext,
    users: UserNamespace,
    mqueue: bool,
) -> Iterator[Spec]:
    """Yield the mounts that replace `given` in a container with a user namespace.

    Such a container can't mount a file system that shows a namespace of the VM, so it gets the VM's own."""
    of_vm = {"/sys"}
    if context.namespace_options.ipc != cri.CONTAINER:
        of_vm.add("/dev/mqueue")
    for mount in given:
        target, found = str(mount["destination"]), mount["options"]
        assert isinstance(found, list)
        if target in of_vm:
            if target != "/dev/mqueue" or mqueue:
                yield _bind(target, target, "rprivate", *found)
        elif target == "/dev/pts" and users.gids.length <= _TTY_GROUP:
            yield {**mount, "options": [each for each in found if not each.startswith("gid=")]}
        else:
            yield mount


def _devices(devices: Iterable[Node]) -> Iterator[Spec]:
    """Yield the VM's devices as mounts: root of a user namespace can't make device files."""
    for device in devices:
        yield _bind(device.source, device.path, "rprivate")


def _file_system(kind: str, target: str, *options: str, source: str = "") -> Spec:
    return {"destination": target, "type": kind, "source": source or kind, "options": list(options)}
