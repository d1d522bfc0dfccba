# SPDX-License-Identifier: Apache-2.0
"""Translation of a CRI ContainerConfig to the properties of a transient unit.

What systemd does not support is refused, naming the field; nothing is left out silently. Sources:
org.freedesktop.systemd1(5), systemd.exec(5), systemd.resource-control(5).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from infranetes_common.commands import PATH, find_program
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import mount_checks, resources
from vmserver.containers.signals import signal_number
from vmserver.containers.systemd.privileges import (
    capabilities,
    identity,
    setpriv,
)

UNIT_PREFIX = "infranetes-"
LOGGER_PREFIX = "infranetes.log-"
INFINITY = 2**64 - 1
CPU_PERIOD = 100_000  # microseconds, the kernel's default
RECURSIVE = 16384  # MS_REC
MAX_CPU = 8191

Property = tuple[str, tuple[str, object]]
"""A name, and a value with its D-Bus signature."""


def unit_name(id: str) -> str:
    """Return the name of a container's unit."""
    return f"{UNIT_PREFIX}{id}.service"


def object_path(unit: str) -> str:
    """Return a unit's D-Bus path."""
    escaped = "".join(
        char if char.isascii() and (char.isalpha() or (char.isdigit() and at)) else f"_{ord(char):02x}"
        for at, char in enumerate(unit)
    )
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def container_of(path: str) -> str:
    """Return the id of the container whose unit has this D-Bus path; "" if there is none."""
    first = object_path(UNIT_PREFIX)
    if not path.startswith(first) or not path.endswith("_2eservice"):
        return ""
    # Ids consist of 0-9, a-z and "-". Only "-" is escaped.
    return path[len(first) : -len("_2eservice")].replace("_2d", "-")


def argv(config: cri.ContainerConfig, executable: Path) -> list[str]:
    """Return the configured command, or else the image's executable, with the configured arguments."""
    return [*(config.command or [str(executable)]), *config.args]


def environment(config: cri.ContainerConfig) -> dict[str, str]:
    """Return the environment variables. What is not UTF-8, as D-Bus is, is replaced in values.

    :raise InvalidArgument: systemd does not support a value."""
    found = {"PATH": PATH}
    who = identity(config.linux.security_context)
    if who is not None:
        found["HOME"] = who.home
    for env in config.envs:
        found[env.key] = env.value.decode(errors="replace")
        if any(ord(char) < 32 and char not in "\t\n" for char in found[env.key]):
            raise InvalidArgument(f"config.envs: {env.key[:80]!r} has a control character in its value")
    return found


def stop_signal(config: cri.ContainerConfig) -> int:
    """Return the number of the stop signal."""
    default = config.stop_signal == cri.RUNTIME_DEFAULT
    return int(signal.SIGTERM if default else signal_number(config.stop_signal))


def check(config: cri.ContainerConfig, exists: Callable[[str], bool]) -> None:
    """Validate a configuration.

    :raise InvalidArgument: something is invalid or not supported; names the field."""
    _refuse(config.tty, "config.tty", "a terminal")
    _refuse(bool(config.devices), "config.devices", "devices")
    _refuse(bool(config.CDI_devices), "config.CDI_devices", "CDI devices")
    stop_signal(config)
    limits(config.linux.resources)
    unit_properties("x", config, ["/x"], "/x", exists, 0)


def unit_properties(
    id: str,
    config: cri.ContainerConfig,
    command: Sequence[str],
    program: str,
    exists: Callable[[str], bool],
    tasks_max: int,
) -> list[Property]:
    """Return the properties of a container's unit, except its standard streams.

    :param command: the arguments. :param program: the path of the file to execute.
    :param exists: tells whether the VM has a path.
    :raise InvalidArgument: something is invalid or not supported; names the field.
    """
    context = config.linux.security_context
    who = identity(context)
    if who is not None:
        command, program = [*setpriv(context), program, *command[1:]], find_program("setpriv")
    variables = [f"{name}={value}" for name, value in environment(config).items()]
    found: list[Property] = [
        ("Description", ("s", f"Infranetes container {id}")),
        ("Type", ("s", "exec")),
        ("RemainAfterExit", ("b", True)),  # keeps the unit until the agent has recorded its end
        ("KillMode", ("s", "control-group")),
        ("KillSignal", ("i", int(signal.SIGKILL))),  # sent to the processes that outlive the first one
        ("OOMPolicy", ("s", "kill")),
        ("TimeoutStartUSec", ("t", 60_000_000)),
        ("TimeoutStopUSec", ("t", 10_000_000)),
        ("ExecStartEx", ("a(sasas)", [(program, list(command), ["no-env-expand"])])),
        ("Environment", ("as", variables)),
        ("WorkingDirectory", ("s", config.working_dir or "/")),
        ("UMask", ("u", 0o022)),
    ]
    if tasks_max:
        found.append(("TasksMax", ("t", tasks_max)))
    if config.linux.resources.oom_score_adj:
        found.append(("OOMScoreAdjust", ("i", config.linux.resources.oom_score_adj)))
    found += _mounts(config, exists)
    found += _security(config.linux.security_context)
    replaced = limits(config.linux.resources)
    names = {name for name, _ in replaced}
    return [each for each in found if each[0] not in names] + replaced


def _refuse(present: bool, field: str, what: str) -> None:
    if present:
        raise InvalidArgument(f"{field}: {what} is not supported by the systemd provider; leave it out")


def limits(requested: cri.LinuxContainerResources) -> list[Property]:
    """Return the limits that can change while a container runs, without those that are 0 or empty.

    :raise InvalidArgument: a limit is out of range or not supported; names the field.
    """
    resources.check(requested)
    found: list[Property] = []
    if requested.cpu_shares:
        found.append(("CPUWeight", ("t", resources.cpu_weight(requested.cpu_shares))))
    if requested.cpu_quota:
        period = requested.cpu_period or CPU_PERIOD
        quota = INFINITY if requested.cpu_quota < 0 else requested.cpu_quota * 1_000_000 // period
        found.append(("CPUQuotaPerSecUSec", ("t", quota)))
        found.append(("CPUQuotaPeriodUSec", ("t", period)))
    memory, swap = requested.memory_limit_in_bytes, requested.memory_swap_limit_in_bytes
    if memory:
        found.append(("MemoryMax", ("t", INFINITY if memory < 0 else memory)))
        # kubelet expects no swap unless it sets a limit.
        swap_alone = INFINITY if min(memory, swap) < 0 else max(0, swap - memory)
        found.append(("MemorySwapMax", ("t", swap_alone)))
    for name, field in (("AllowedCPUs", "cpuset_cpus"), ("AllowedMemoryNodes", "cpuset_mems")):
        if getattr(requested, field):
            found.append((name, ("ay", _mask(f"resources.{field}", getattr(requested, field)))))
    for page in requested.hugepage_limits:
        _refuse(page.limit > 0, "resources.hugepage_limits", "a limit of huge pages")
    for name, value in requested.unified.items():
        if (name, value) != _KILLED_TOGETHER:
            found.append(_unified(name, value))
    return found


_UNIFIED = {"pids.max": "TasksMax", "memory.high": "MemoryHigh", "memory.low": "MemoryLow",
            "memory.min": "MemoryMin", "memory.swap.max": "MemorySwapMax"}  # fmt: skip
# kubelet adds it to every container where its node has cgroup v2; units' OOMPolicy is that already.
_KILLED_TOGETHER = ("memory.oom.group", "1")


def _unified(name: str, value: str) -> Property:
    if name not in _UNIFIED:
        known = ", ".join(_UNIFIED)
        raise InvalidArgument(f"resources.unified: {name[:80]!r} is not supported; these are: {known}")
    if value != "max" and not (value.isascii() and value.isdecimal() and len(value) < 20):
        raise InvalidArgument(f"resources.unified: {name} {value[:40]!r}: expected a number, or max")
    return _UNIFIED[name], ("t", INFINITY if value == "max" else min(int(value), INFINITY))


def _mask(field: str, text: str) -> bytes:
    """Convert a list in the kernel's format, such as "0-2,7", to a bit mask."""
    bits = 0
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        numbers = [int(word) if word.isascii() and word.isdecimal() else -1 for word in (first, last)]
        if not 0 <= numbers[0] <= numbers[1] <= MAX_CPU:
            raise InvalidArgument(f"{field} {text[:80]!r}: expected a list like 0-2,7")
        for number in range(numbers[0], numbers[1] + 1):
            bits |= 1 << number
    return bits.to_bytes((bits.bit_length() + 7) // 8 or 1, "little")


def _mounts(config: cri.ContainerConfig, exists: Callable[[str], bool]) -> list[Property]:
    writable: list[tuple[str, str, bool, int]] = []
    readable: list[tuple[str, str, bool, int]] = []
    targets = []
    for mount in config.mounts:
        field, target = mount_checks.field(mount), mount_checks.target(mount)
        _refuse(mount.HasField("image"), field, "an image as a volume")
        _refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
        _refuse(mount.recursive_read_only, field, "recursive_read_only")
        _refuse(mount.propagation == cri.PROPAGATION_BIDIRECTIONAL, field, "mount propagation to the VM")
        bind = (mount_checks.source(mount, exists), target, False, RECURSIVE)
        (readable if mount.readonly else writable).append(bind)
        if not mount.readonly:
            targets.append(target)
    found: list[Property] = []
    if writable:
        found.append(("BindPaths", ("a(ssbt)", writable)))
    if readable:
        found.append(("BindReadOnlyPaths", ("a(ssbt)", readable)))
    if config.linux.security_context.readonly_rootfs:
        found.append(("ProtectSystem", ("s", "strict")))
        if targets:
            found.append(("ReadWritePaths", ("as", targets)))
    return found


def _security(context: cri.LinuxContainerSecurityContext) -> list[Property]:
    found: list[Property] = []
    if identity(context) is None and context.run_as_username:
        found.append(("User", ("s", context.run_as_username)))  # if it does not exist, systemd reports that
    names = cri.SecurityProfile
    for field in ("seccomp", "apparmor"):
        profile = getattr(context, field)
        _refuse(
            context.HasField(field) and profile.profile_type == names.Localhost,
            f"security_context.{field}",
            "a profile of the node (Localhost)",
        )
    options = context.namespace_options
    _refuse(
        options.network in (cri.CONTAINER, cri.TARGET), "namespace_options.network", "a network of its own"
    )
    _refuse(options.pid == cri.TARGET, "namespace_options.pid", "another container's processes")
    _refuse(options.ipc == cri.TARGET, "namespace_options.ipc", "another container's IPC")
    _refuse(
        bool(options.userns_options.uids or options.userns_options.gids),
        "namespace_options.userns_options",
        "a user namespace",
    )
    allowed = capabilities(context.capabilities)
    if identity(context) is None:  # otherwise setpriv drops them, and needs some itself to do so
        if not context.privileged:
            found.append(("CapabilityBoundingSet", ("t", allowed)))
        if context.no_new_privs:
            found.append(("NoNewPrivileges", ("b", True)))
    _refuse(
        bool(context.capabilities.add_ambient_capabilities),
        "security_context.capabilities.add_ambient_capabilities",
        "ambient capabilities",
    )
    return found
