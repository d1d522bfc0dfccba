# SPDX-License-Identifier: Apache-2.0
"""The specification of a container: a CRI ContainerConfig as the config.json of the OCI runtime-spec.

The result depends only on the configuration and the earlier lookups; nothing here reads a file. Unsupported
fields are refused by name. Annotations are not passed on, because crun obeys some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

from infranetes_common.commands import PATH
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.accounts import ProcessUser
from vmserver.containers.oci.addresses import PERSONALITY
from vmserver.containers.oci.capabilities import Capabilities, container_capabilities
from vmserver.containers.oci.confinement import profile_name
from vmserver.containers.oci.image import ImageDefaults
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.limits import Spec, linux_resources
from vmserver.containers.oci.lookup import Lookup
from vmserver.containers.oci.mounts import container_mounts
from vmserver.containers.oci.seccomp import container_seccomp
from vmserver.containers.oci.user_namespaces import check_capabilities, check_user, wanted_by
from vmserver.containers.security import refuse
from vmserver.pod_settings import ipc_sysctls

OCI_VERSION = "1.0.2"

# Docker's lists, for a container without a security context, which brings none.
_MASKED = (
    *(f"/proc/{name}" for name in ("asound", "acpi", "interrupts", "kcore", "keys", "latency_stats")),
    *(f"/proc/{name}" for name in ("timer_list", "timer_stats", "sched_debug", "scsi")),
    *("/sys/firmware", "/sys/devices/virtual/powercap"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@attrs.frozen
class NewContainer:
    """The description of a container to create.

    :param lookup: what `look_up` returned for `config`.
    :param cgroup: its path below the root of the cgroups, as /infranetes/ID.
    :param target_pid: with a pid namespace TARGET, the first process of that container; 0: it does not run.
    :param init_pid: with a pid namespace POD, the init of the pod's own.
    :param volumes: directories for `mounts.image_volumes`, by their path in the container.
    :param user_namespace: the file of the pod's user namespace, if `config` asks for it.
    """

    id: str
    config: cri.ContainerConfig
    sandbox_config: cri.PodSandboxConfig
    image: ImageDefaults
    rootfs: Path
    lookup: Lookup
    kernel: Kernel
    cgroup: str
    target_pid: int = 0
    init_pid: int = 0
    volumes: Mapping[str, Path] = MappingProxyType({})
    user_namespace: Path | None = None


def container_spec(container: NewContainer) -> Spec:
    """Return the config.json of a container.

    :raise InvalidArgument: something is malformed or not supported; names the field.
    :raise FailedPrecondition: the container whose processes it is to see does not run.
    """
    config, lookup = container.config, container.lookup
    context = config.linux.security_context
    refuse(bool(config.CDI_devices), "config.CDI_devices", "a CDI device")
    capabilities = container_capabilities(context, container.kernel.capabilities)
    users = wanted_by(config)
    if users is not None:
        check_user(lookup.user, users)
        check_capabilities(context.capabilities)
    mounts, propagation = container_mounts(config, lookup, container.volumes, users, container.kernel.mqueue)
    return {
        "ociVersion": OCI_VERSION,
        "process": _process(container, capabilities),
        "root": {"path": str(container.rootfs), "readonly": context.readonly_rootfs},
        "mounts": mounts,
        "linux": _linux(container, capabilities, propagation),
    }


def process_spec(spec: Mapping[str, object], command: Sequence[str], tty: bool) -> Spec:
    """Return the input of `crun exec --process` for a command in a container.

    :param spec: the container's config.json; the command gets its user, environment and confinement.
    """
    own = spec["process"]
    assert isinstance(own, dict)
    process = {name: value for name, value in own.items() if name != "oomScoreAdj"}  # crun ignores it here
    environment = list(process["env"])
    if tty and not any(entry.startswith("TERM=") for entry in environment):
        environment.append("TERM=xterm")
    return {**process, "args": _texts("command", command), "terminal": tty, "env": environment}


def _process(container: NewContainer, capabilities: Capabilities) -> Spec:
    config, user = container.config, container.lookup.user
    context = config.linux.security_context
    process: Spec = {
        "terminal": config.tty,
        "user": _user(user),
        "args": arguments(config, container.image),
        "env": environment(config, container.image, container.lookup.hostname, user.home),
        "cwd": _working_directory(config, container.image),
        "capabilities": capabilities.sets(user.uid),
        "rlimits": [
            {"type": kind, "soft": value, "hard": value} for kind, value in container.kernel.rlimits.items()
        ],
        "noNewPrivileges": context.no_new_privs,
        "oomScoreAdj": config.linux.resources.oom_score_adj,
    }
    if profile := profile_name(context, container.kernel):
        process["apparmorProfile"] = profile
    return process


def _user(user: ProcessUser) -> Spec:
    # The primary group is a supplementary group too, so that a process gains nothing by leaving it.
    groups = list(dict.fromkeys((user.gid, *user.groups)))
    return {"uid": user.uid, "gid": user.gid, "additionalGids": groups}


def arguments(config: cri.ContainerConfig, image: ImageDefaults) -> list[str]:
    """Return the command of the first process. :raise InvalidArgument: neither has one."""
    command, args = _texts("config.command", config.command), _texts("config.args", config.args)
    if not command:
        # A Dockerfile takes its base image's entrypoint away by ENTRYPOINT [""].
        command = list(image.entrypoint) if image.entrypoint != ("",) else []
        args = args or list(image.command)
    if not command + args:
        raise InvalidArgument("config.command: empty, and the image has neither entrypoint nor command")
    return command + args


def environment(config: cri.ContainerConfig, image: ImageDefaults, hostname: str, home: str) -> list[str]:
    """Return the environment of the first process; of a name that is set twice the later one counts.

    What is not UTF-8, as crun's configuration is, is replaced in values, as containerd does."""
    found = {"PATH": PATH, "HOSTNAME": hostname}
    if config.tty:
        found["TERM"] = "xterm"
    found["HOME"] = home
    for entry in image.env:
        name, equals, value = entry.partition("=")
        if name and equals:
            found[name] = value
    for variable in config.envs:
        value = variable.value.decode(errors="replace")
        if not variable.key or set("=\0") & set(variable.key) or "\0" in value:
            raise InvalidArgument(f"config.envs: {variable.key[:80]!r} can't be in an environment")
        found[variable.key] = value
    return [f"{name}={value}" for name, value in found.items()]


def _working_directory(config: cri.ContainerConfig, image: ImageDefaults) -> str:
    if config.working_dir:
        if not config.working_dir.startswith("/") or "\0" in config.working_dir:
            raise InvalidArgument(f"config.working_dir: {config.working_dir[:200]!r} is no absolute path")
        return config.working_dir
    return "/" + image.working_dir.lstrip("/")


def _texts(field: str, values: Sequence[str]) -> list[str]:
    if any("\0" in value for value in values):
        raise InvalidArgument(f"{field}: a NUL can't be in an argument")
    return list(values)


def _linux(container: NewContainer, capabilities: Capabilities, propagation: str) -> Spec:
    linux, kernel = container.config.linux, container.kernel
    context = linux.security_context
    resources = linux_resources(linux.resources, kernel)
    resources["devices"] = _device_rules(container)
    found: Spec = {
        "namespaces": _namespaces(container),
        "cgroupsPath": container.cgroup,
        "resources": resources,
        "devices": [] if container.user_namespace else [node.device() for node in container.lookup.devices],
        "personality": PERSONALITY,
    }
    if propagation:
        found["rootfsPropagation"] = propagation
    if not context.privileged:
        confined = linux.HasField("security_context")  # even with empty lists: procMount Unmasked
        masked = context.masked_paths if confined else _MASKED
        read_only = context.readonly_paths if confined else _READ_ONLY
        found["maskedPaths"] = _paths("masked_paths", masked)
        found["readonlyPaths"] = _paths("readonly_paths", read_only)
    if context.namespace_options.ipc == cri.CONTAINER:
        found["sysctl"] = ipc_sysctls(container.sandbox_config)
    seccomp = container_seccomp(context, capabilities.bounding, kernel)
    if seccomp is not None:
        found["seccomp"] = seccomp
    return found


def _device_rules(container: NewContainer) -> list[Spec]:
    """Return the rules for access to devices. crun adds rules for the devices of every container."""
    if container.config.linux.security_context.privileged:
        return [{"allow": True, "access": "rwm"}]
    return [{"allow": False, "access": "rwm"}, *(node.rule() for node in container.lookup.devices)]


def _paths(field: str, paths: Sequence[str]) -> list[str]:
    for path in paths:
        if not path.startswith("/") or "\0" in path:
            raise InvalidArgument(f"security_context.{field}: {path[:200]!r} is no absolute path")
    return list(paths)


def _namespaces(container: NewContainer) -> list[Spec]:
    """Return the namespaces that are not the VM's, whose others are the pod's.

    :raise InvalidArgument: one is not supported. :raise FailedPrecondition: the target does not run."""
    options = container.config.linux.security_context.namespace_options
    for field in ("network", "pid", "ipc"):
        if getattr(options, field) not in cri.NamespaceMode.values():
            raise InvalidArgument(f"namespace_options.{field}: {getattr(options, field)} is no mode")
    refuse(
        options.network in (cri.CONTAINER, cri.TARGET), "namespace_options.network", "a network of its own"
    )
    refuse(options.ipc == cri.TARGET, "namespace_options.ipc", "another container's IPC")
    found: list[Spec] = [{"type": "mount"}]
    if container.user_namespace is not None:
        found.append({"type": "user", "path": str(container.user_namespace)})
    if container.kernel.cgroup2:
        found.append({"type": "cgroup"})
    if options.ipc == cri.CONTAINER:
        found.append({"type": "ipc"})
    if options.pid == cri.CONTAINER:
        found.append({"type": "pid"})
    if options.pid == cri.POD:
        found.append(pid_namespace(container.init_pid))
    if options.pid == cri.TARGET:
        if not options.target_id:
            raise InvalidArgument("namespace_options.target_id: empty, but pid is TARGET")
        if not container.target_pid:
            raise FailedPrecondition(
                f"namespace_options.target_id: container {options.target_id[:80]} does not run"
            )
        found.append(pid_namespace(container.target_pid))
    return found


def pid_namespace(pid: int) -> Spec:
    """Return the PID namespace of a process as one for a container to join."""
    return {"type": "pid", "path": f"/proc/{pid}/ns/pid"}
