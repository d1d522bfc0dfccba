"""A CRI ContainerConfig as the body of the Engine API's ContainerCreate, and nothing but that.

What Docker can't give is refused by name: a container never runs with less than was asked for.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infranetes_common import cri
from infranetes_common.errors import InvalidArgument
from vmserver.containers.docker import security
from vmserver.containers.docker.accounts import Identity
from vmserver.containers.docker.image_volumes import LABEL_IMAGES
from vmserver.containers.docker.security import refuse
from vmserver.containers.signals import signal_name

LABEL_ID = "io.infranetes.container"
LABEL_RESOURCES = "io.infranetes.resources"  # LinuxContainerResources as asked for at first, base64

_PROPAGATION = {
    cri.PROPAGATION_PRIVATE: "rprivate",
    cri.PROPAGATION_HOST_TO_CONTAINER: "rslave",
    cri.PROPAGATION_BIDIRECTIONAL: "rshared",
}


def create_body(
    id: str,
    image_id: str,
    config: Any,
    *,
    identity: Identity,
    files: Mapping[str, Path],
    log_options: Mapping[str, str],
    exists: Callable[[str], bool],
    ipc_sysctls: Mapping[str, str] = MappingProxyType({}),
    image_paths: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The body that creates container `id`.

    :param identity: who its first process is.
    :param files: the sandbox's own files, by their path in a container, where no mount is in their place.
    :param exists: whether the machine has a path.
    :param ipc_sysctls: the sandbox's, for a container that has an IPC namespace of its own.
    :param image_paths: where mounts of images are, by their place among the mounts.
    :raise InvalidArgument: something that can't be had; names the field.
    """
    linux = config.linux
    refuse(bool(config.CDI_devices), "config.CDI_devices", "CDI devices")
    body: dict[str, Any] = {
        "Image": image_id,
        "Env": [f"{env.key}={env.value.decode(errors='replace')}" for env in config.envs],
        "Tty": config.tty,
        "OpenStdin": config.stdin,
        "StdinOnce": config.stdin_once,
        "Labels": {
            LABEL_ID: id,
            LABEL_RESOURCES: base64.b64encode(linux.resources.SerializeToString()).decode(),
        },
    }
    if config.command:
        body["Entrypoint"] = list(config.command)
    if config.args:
        body["Cmd"] = list(config.args)
    if config.working_dir:
        body["WorkingDir"] = config.working_dir
    if config.stop_signal != cri.RUNTIME_DEFAULT:
        body["StopSignal"] = signal_name(config.stop_signal)
    host: dict[str, Any] = {
        "NetworkMode": "host",
        "UTSMode": "host",
        "LogConfig": {"Type": "json-file", "Config": dict(log_options)},
        "Mounts": mounts(config.mounts, files, exists, image_paths),
        "Devices": devices(config.devices, exists),
        **resources(linux.resources),
    }
    body["HostConfig"] = host
    images = sorted({mount.image.image for mount in config.mounts if mount.HasField("image")})
    if images:
        body["Labels"][LABEL_IMAGES] = ",".join(images)
    if identity.user:
        body["User"] = identity.user
    host["GroupAdd"] = [str(group) for group in identity.groups]
    security.put(linux, host)
    if host["IpcMode"] == "private":
        host["Sysctls"] = dict(ipc_sysctls)
    return body


def resources(limits: Any) -> dict[str, Any]:
    """LinuxContainerResources as HostConfig has them; fields left 0 are left out.

    :raise InvalidArgument: out of bounds.
    """
    for field in ("cpu_period", "cpu_shares", "memory_limit_in_bytes"):
        if getattr(limits, field) < 0:
            raise InvalidArgument(f"resources.{field} {getattr(limits, field)}: expected 0 or more")
    if not -1000 <= limits.oom_score_adj <= 1000:
        raise InvalidArgument(f"resources.oom_score_adj {limits.oom_score_adj}: expected -1000 to 1000")
    swap = limits.memory_swap_limit_in_bytes
    if not swap and limits.memory_limit_in_bytes:
        swap = limits.memory_limit_in_bytes  # as kubelet means it: no swap unless asked for
    found = {
        "CpuPeriod": limits.cpu_period,
        "CpuQuota": limits.cpu_quota,
        "CpuShares": limits.cpu_shares,
        "Memory": limits.memory_limit_in_bytes,
        "MemorySwap": swap,
        "OomScoreAdj": limits.oom_score_adj,
        "CpusetCpus": limits.cpuset_cpus,
        "CpusetMems": limits.cpuset_mems,
    }
    return {key: value for key, value in found.items() if value}


def mounts(
    wanted: Any,
    files: Mapping[str, Path],
    exists: Callable[[str], bool],
    image_paths: Mapping[int, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """HostConfig.Mounts.

    :raise InvalidArgument: a source that the machine lacks, or a kind that can't be had.
    """
    found = []
    taken = set()
    for index, mount in enumerate(wanted):
        field = f"config.mounts {mount.container_path[:200]!r}"
        target = posixpath.normpath(mount.container_path)
        if not target.startswith("/") or target == "/" or "\0" in mount.container_path + mount.host_path:
            raise InvalidArgument(f"{field}: container_path has to be an absolute path below /")
        refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
        refuse(mount.recursive_read_only, field, "recursive_read_only")
        taken.add(target)
        if mount.HasField("image"):
            # Read-only and noexec by its file system; another mount of it would have to say so again.
            found.append(_bind(image_paths[index], target, False, "rprivate"))
            continue
        if not mount.host_path.startswith("/") or not exists(mount.host_path):
            raise InvalidArgument(f"{field}: the node has not brought {mount.host_path[:200]!r} into the VM")
        found.append(
            _bind(mount.host_path, target, mount.readonly, _PROPAGATION.get(mount.propagation, "rprivate"))
        )
    return found + [
        _bind(str(source), target, False, "rprivate")
        for target, source in sorted(files.items())
        if target not in taken and exists(str(source))
    ]


def _bind(source: str, target: str, read_only: bool, propagation: str) -> dict[str, Any]:
    options = {"Propagation": propagation}
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only, "BindOptions": options}


def devices(wanted: Any, exists: Callable[[str], bool]) -> list[dict[str, str]]:
    """HostConfig.Devices. :raise InvalidArgument: the machine lacks one, or the permissions are none."""
    found = []
    for device in wanted:
        inside = device.container_path or device.host_path
        permissions = device.permissions or "rwm"
        if not device.host_path.startswith("/") or not exists(device.host_path):
            raise InvalidArgument(f"config.devices: the VM has no device {device.host_path[:200]!r}")
        if not set(permissions) <= set("rwm"):
            raise InvalidArgument(f"config.devices {inside[:200]!r}: permissions are some of r, w and m")
        found.append(
            {"PathOnHost": device.host_path, "PathInContainer": inside, "CgroupPermissions": permissions}
        )
    return found
