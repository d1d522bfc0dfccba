"""A CRI ContainerConfig as the body of the Engine API's ContainerCreate, and nothing but that.

What Docker can't give is refused by name: a container never runs with less than was asked for.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infranetes_common import cri
from infranetes_common.errors import InvalidArgument
from vmserver.containers.signals import signal_name

NAME_PREFIX = "infranetes-"
LABEL_ID = "io.infranetes.container"
LABEL_RESOURCES = "io.infranetes.resources"  # LinuxContainerResources as asked for at first, base64

_PROPAGATION = {
    cri.PROPAGATION_PRIVATE: "rprivate",
    cri.PROPAGATION_HOST_TO_CONTAINER: "rslave",
    cri.PROPAGATION_BIDIRECTIONAL: "rshared",
}
_PROFILE = cri.SecurityProfile


def create_body(
    id: str,
    image_id: str,
    config: Any,
    *,
    files: Mapping[str, Path],
    log_options: Mapping[str, str],
    exists: Callable[[str], bool],
) -> dict[str, Any]:
    """The body that creates container `id`.

    :param files: the sandbox's own files, by their path in a container, where no mount is in their place.
    :param exists: whether the machine has a path.
    :raise InvalidArgument: something that can't be had; names the field.
    """
    linux = config.linux
    _refuse(bool(config.CDI_devices), "config.CDI_devices", "CDI devices")
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
        "Mounts": mounts(config.mounts, files, exists),
        "Devices": devices(config.devices, exists),
        **resources(linux.resources),
    }
    body["HostConfig"] = host
    _security(linux, body, host)
    return body


def _refuse(present: bool, field: str, what: str) -> None:
    if present:
        raise InvalidArgument(f"{field}: {what} can't be had in this runtime; leave it out")


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


def mounts(wanted: Any, files: Mapping[str, Path], exists: Callable[[str], bool]) -> list[dict[str, Any]]:
    """HostConfig.Mounts.

    :raise InvalidArgument: a source that the machine lacks, or a kind that can't be had.
    """
    found = []
    taken = set()
    for mount in wanted:
        field = f"config.mounts {mount.container_path[:200]!r}"
        target = posixpath.normpath(mount.container_path)
        if not target.startswith("/") or target == "/" or "\0" in mount.container_path + mount.host_path:
            raise InvalidArgument(f"{field}: container_path has to be an absolute path below /")
        _refuse(mount.HasField("image"), field, "an image as a volume")
        _refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
        _refuse(mount.recursive_read_only, field, "recursive_read_only")
        if not mount.host_path.startswith("/") or not exists(mount.host_path):
            raise InvalidArgument(f"{field}: the node has not brought {mount.host_path[:200]!r} into the VM")
        taken.add(target)
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


def _security(linux: Any, body: dict[str, Any], host: dict[str, Any]) -> None:
    context = linux.security_context
    user = _user(context)
    if user:
        body["User"] = user
    if any(group < 0 for group in context.supplemental_groups):
        raise InvalidArgument("security_context.supplemental_groups: a negative group id")
    host["GroupAdd"] = [str(group) for group in context.supplemental_groups]
    _refuse(
        context.supplemental_groups_policy == cri.Strict,
        "security_context.supplemental_groups_policy",
        "Strict",
    )
    _refuse(
        bool(context.capabilities.add_ambient_capabilities),
        "security_context.capabilities.add_ambient_capabilities",
        "ambient capabilities",
    )
    host["CapAdd"] = [_capability(name) for name in context.capabilities.add_capabilities]
    host["CapDrop"] = [_capability(name) for name in context.capabilities.drop_capabilities]
    host["Privileged"] = context.privileged
    host["ReadonlyRootfs"] = context.readonly_rootfs
    if linux.HasField("security_context") and not context.privileged:
        # Said and empty is "none", as with procMount: Unmasked; unsaid leaves Docker's own.
        host["MaskedPaths"] = list(context.masked_paths)
        host["ReadonlyPaths"] = list(context.readonly_paths)
    host["SecurityOpt"] = _options(context)
    host.update(_namespaces(context.namespace_options))


def _user(context: Any) -> str:
    has_user = context.HasField("run_as_user")
    if has_user and context.run_as_user.value < 0:
        raise InvalidArgument("security_context.run_as_user: a negative user id")
    user = str(context.run_as_user.value) if has_user else context.run_as_username
    if context.HasField("run_as_group"):
        if not user:
            raise InvalidArgument(
                "security_context.run_as_group: needs run_as_user or run_as_username beside it"
            )
        if context.run_as_group.value < 0:
            raise InvalidArgument("security_context.run_as_group: a negative group id")
        user += f":{context.run_as_group.value}"
    return user


def _capability(name: str) -> str:
    if not name.replace("_", "").isalpha() or not name.isascii():
        raise InvalidArgument(f"security_context.capabilities: {name[:80]!r} is no capability")
    upper = name.upper()
    return upper if upper == "ALL" or upper.startswith("CAP_") else "CAP_" + upper


def _options(context: Any) -> list[str]:
    options = []
    if context.no_new_privs:
        options.append("no-new-privileges")
    seccomp = context.seccomp.profile_type if context.HasField("seccomp") else None
    path = context.seccomp_profile_path
    _refuse(
        seccomp == _PROFILE.Localhost or path.startswith("localhost/"),
        "security_context.seccomp",
        "a profile of the node (Localhost)",
    )
    if seccomp == _PROFILE.Unconfined or (seccomp is None and path == "unconfined"):
        options.append("seccomp=unconfined")
    apparmor = context.apparmor.profile_type if context.HasField("apparmor") else None
    old = context.apparmor_profile
    _refuse(
        apparmor == _PROFILE.Localhost or old.startswith("localhost/"),
        "security_context.apparmor",
        "a profile of the node (Localhost)",
    )
    if apparmor == _PROFILE.Unconfined or (apparmor is None and old == "unconfined"):
        options.append("apparmor=unconfined")
    return options


def _namespaces(options: Any) -> dict[str, str]:
    """The machine is the pod: its network, IPC and process namespaces are the pod's and the "node's"."""
    _refuse(
        options.network in (cri.CONTAINER, cri.TARGET), "namespace_options.network", "a network of its own"
    )
    _refuse(options.ipc == cri.TARGET, "namespace_options.ipc", "another container's IPC")
    _refuse(
        bool(options.userns_options.uids or options.userns_options.gids),
        "namespace_options.userns_options",
        "a user namespace",
    )
    if options.pid == cri.TARGET and not options.target_id:
        raise InvalidArgument("namespace_options.target_id: empty, but pid is TARGET")
    pid = {
        cri.POD: "host",
        cri.NODE: "host",
        cri.CONTAINER: "",
        cri.TARGET: f"container:{NAME_PREFIX}{options.target_id}",
    }[options.pid]
    return {"PidMode": pid, "IpcMode": "private" if options.ipc == cri.CONTAINER else "host"}
