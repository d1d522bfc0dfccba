# SPDX-License-Identifier: Apache-2.0
"""Translation of a CRI ContainerConfig to the body of the Engine API's ContainerCreate.

What Docker does not support is refused, naming the field; nothing is left out silently.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from infranetes_common.wire import cri
from vmserver.containers import device_checks, mount_checks, resources
from vmserver.containers.docker.accounts import DockerUser
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.names import LABEL_ID, LABEL_IMAGES, LABEL_RESOURCES, LABEL_SHARES
from vmserver.containers.docker.security import security_fields
from vmserver.containers.security import refuse
from vmserver.containers.signals import signal_name

_PROPAGATION = {
    cri.PROPAGATION_PRIVATE: "rprivate",
    cri.PROPAGATION_HOST_TO_CONTAINER: "rslave",
    cri.PROPAGATION_BIDIRECTIONAL: "rshared",
}


def create_body(
    id: str,
    image_id: str,
    config: cri.ContainerConfig,
    *,
    identity: DockerUser,
    files: Mapping[str, Path],
    log_options: Mapping[str, str],
    exists: Callable[[str], bool],
    ipc_sysctls: Mapping[str, str] = MappingProxyType({}),
    image_paths: Mapping[int, str] = MappingProxyType({}),
) -> Request:
    """Return the request that creates container `id`.

    :param identity: the user and groups of its first process.
    :param files: the sandbox's own files by their path in a container; a mount at that path hides them.
    :param exists: tells whether the VM has a path.
    :param ipc_sysctls: the sandbox's, for a container with an IPC namespace of its own.
    :param image_paths: the paths of image volumes by their index among the mounts.
    :raise InvalidArgument: something is invalid or not supported; names the field.
    """
    linux = config.linux
    refuse(bool(config.CDI_devices), "config.CDI_devices", "a CDI device")
    labels = {
        LABEL_ID: id,
        LABEL_RESOURCES: base64.b64encode(linux.resources.SerializeToString()).decode(),
    }
    body: Request = {
        "Image": image_id,
        "Env": [f"{env.key}={env.value.decode(errors='replace')}" for env in config.envs],
        "Tty": config.tty,
        "OpenStdin": config.stdin,
        "StdinOnce": config.stdin_once,
        "Labels": labels,
    }
    if config.command:
        body["Entrypoint"] = list(config.command)
    if config.args:
        body["Cmd"] = list(config.args)
    if config.working_dir:
        body["WorkingDir"] = config.working_dir
    if config.stop_signal != cri.RUNTIME_DEFAULT:
        body["StopSignal"] = signal_name(config.stop_signal)
    if identity.user:
        body["User"] = identity.user
    images = sorted({mount.image.image for mount in config.mounts if mount.HasField("image")})
    if linux.security_context.namespace_options.pid == cri.POD:
        labels[LABEL_SHARES] = "1"
    if images:
        labels[LABEL_IMAGES] = ",".join(images)
    body["HostConfig"] = host = {
        "NetworkMode": "host",
        "UTSMode": "host",
        "LogConfig": {"Type": "json-file", "Config": dict(log_options)},
        "Mounts": mounts(config.mounts, files, exists, image_paths),
        "Devices": devices(config.devices, exists),
        "GroupAdd": [str(group) for group in identity.groups],
        **limits_body(linux.resources),
        **security_fields(linux),
    }
    if host["IpcMode"] == "private":
        host["Sysctls"] = dict(ipc_sysctls)
    return body


def limits_body(limits: cri.LinuxContainerResources) -> Request:
    """Return limits as fields of HostConfig, without those that are 0 or empty.

    :raise InvalidArgument: a limit is out of range; names the field.
    """
    resources.check(limits)
    memory, swap = limits.memory_limit_in_bytes, limits.memory_swap_limit_in_bytes
    if not swap and memory > 0:
        swap = memory  # kubelet expects no swap unless it sets a limit
    fields: Request = {
        "CpuPeriod": limits.cpu_period,
        "CpuQuota": limits.cpu_quota,
        "CpuShares": limits.cpu_shares,
        "Memory": max(memory, 0),
        "MemorySwap": swap,
        "OomScoreAdj": limits.oom_score_adj,
        "CpusetCpus": limits.cpuset_cpus,
        "CpusetMems": limits.cpuset_mems,
    }
    return {name: value for name, value in fields.items() if value}


def mounts(
    cri_mounts: Iterable[cri.Mount],
    files: Mapping[str, Path],
    exists: Callable[[str], bool],
    image_paths: Mapping[int, str] = MappingProxyType({}),
) -> list[Request]:
    """Return HostConfig.Mounts.

    :raise InvalidArgument: the VM lacks a source, or a mount is invalid or not supported.
    """
    found = []
    taken = set()
    for index, mount in enumerate(cri_mounts):
        field, target = mount_checks.field(mount), mount_checks.target(mount)
        refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
        refuse(mount.recursive_read_only, field, "recursive_read_only")
        taken.add(target)
        if mount.HasField("image"):
            # The image is mounted read-only and noexec, and a bind mount without options keeps these.
            found.append(_bind(image_paths[index], target, False, "rprivate"))
            continue
        source = mount_checks.source(mount, exists)
        propagation = _PROPAGATION.get(mount.propagation, "rprivate")
        found.append(_bind(source, target, mount.readonly, propagation))
    return found + [
        _bind(str(file), target, False, "rprivate")
        for target, file in sorted(files.items())
        if target not in taken and exists(str(file))
    ]


def _bind(source: str, target: str, read_only: bool, propagation: str) -> Request:
    options = {"Propagation": propagation}
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only, "BindOptions": options}


def devices(cri_devices: Iterable[cri.Device], exists: Callable[[str], bool]) -> list[Request]:
    """Return HostConfig.Devices. :raise InvalidArgument: the VM lacks one, or the permissions are invalid."""
    found: list[Request] = []
    for device in cri_devices:
        inside = device.container_path or device.host_path
        if not device.host_path.startswith("/") or not exists(device.host_path):
            raise device_checks.missing(device)
        permissions = device_checks.permissions(device)
        found.append(
            {"PathOnHost": device.host_path, "PathInContainer": inside, "CgroupPermissions": permissions}
        )
    return found
