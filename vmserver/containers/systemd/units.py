"""A CRI ContainerConfig as the properties of a transient unit, and nothing but that.

Source: org.freedesktop.systemd1(5), systemd.exec(5), systemd.resource-control(5). What systemd can't give is
refused by name: a container never runs with less than was asked for.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import pwd
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from vmserver.containers.signals import signal_number

UNIT_PREFIX = "infranetes-"
LOGGER_PREFIX = "infranetes.log-"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INFINITY = 2**64 - 1
CPU_PERIOD = 100_000  # microseconds, the kernel's default
RECURSIVE = 16384  # MS_REC
MAX_CPU = 8191

Property = tuple[str, tuple[str, Any]]

# What a container may do of what root may, as docker and containerd have it.
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
)  # fmt: skip
# By their numbers in linux/capability.h.
ALL_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip


def unit_name(id: str) -> str:
    """The unit of a container."""
    return f"{UNIT_PREFIX}{id}.service"


def object_path(unit: str) -> str:
    """A unit's path on the bus."""
    escaped = "".join(
        char if char.isascii() and (char.isalpha() or (char.isdigit() and at)) else f"_{ord(char):02x}"
        for at, char in enumerate(unit)
    )
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def container_of(path: str) -> str:
    """The container whose unit has this path on the bus; "": none."""
    first = object_path(UNIT_PREFIX)
    if not path.startswith(first) or not path.endswith("_2eservice"):
        return ""
    # Ids are of 0-9, a-z and -: nothing else can be escaped in one.
    return path[len(first) : -len("_2eservice")].replace("_2d", "-")


def argv(config: Any, executable: Path) -> list[str]:
    """What is run: the config's command, else the image's own executable, with the config's arguments."""
    return [*(config.command or [str(executable)]), *config.args]


def environment(config: Any) -> dict[str, str]:
    """A container's variables."""
    found = {"PATH": DEFAULT_PATH}
    who = identity(config.linux.security_context)
    if who is not None:
        found["HOME"] = who.home
    for env in config.envs:
        try:
            found[env.key] = env.value.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"config.envs: the value of {env.key[:80]!r} is not UTF-8") from None
        if any(ord(char) < 32 and char not in "\t\n" for char in found[env.key]):
            raise InvalidArgument(f"config.envs: {env.key[:80]!r} has a control character in its value")
    return found


def stop_signal(config: Any) -> int:
    """The number of the signal that asks it to end."""
    unsaid = config.stop_signal == cri.RUNTIME_DEFAULT
    return int(signal.SIGTERM if unsaid else signal_number(config.stop_signal))


def check(config: Any, exists: Callable[[str], bool]) -> None:
    """:raise InvalidArgument: something that can't be had; names the field."""
    _refuse(config.tty, "config.tty", "a terminal")
    _refuse(bool(config.devices), "config.devices", "devices")
    _refuse(bool(config.CDI_devices), "config.CDI_devices", "CDI devices")
    stop_signal(config)
    limits(config.linux.resources)
    unit_properties("x", config, ["/x"], "/x", exists, 0)


def unit_properties(
    id: str,
    config: Any,
    words: Sequence[str],
    program: str,
    exists: Callable[[str], bool],
    tasks_max: int,
) -> list[Property]:
    """All of a container's unit but where its streams go.

    :param words: its command. :param program: the path of the file that is run.
    :param exists: whether the machine has a path.
    :raise InvalidArgument: something that can't be had; names the field.
    """
    context = config.linux.security_context
    who = identity(context)
    if who is not None:
        words, program = [*setpriv(context), program, *words[1:]], _setpriv()
    variables = [f"{name}={value}" for name, value in environment(config).items()]
    found: list[Property] = [
        ("Description", ("s", f"Infranetes container {id}")),
        ("Type", ("s", "exec")),
        ("RemainAfterExit", ("b", True)),  # until the agent has seen how it ended
        ("KillMode", ("s", "control-group")),
        ("KillSignal", ("i", int(signal.SIGKILL))),  # when its first process has ended, all end
        ("OOMPolicy", ("s", "kill")),
        ("TimeoutStartUSec", ("t", 60_000_000)),
        ("TimeoutStopUSec", ("t", 10_000_000)),
        ("ExecStartEx", ("a(sasas)", [(program, list(words), ["no-env-expand"])])),
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
        raise InvalidArgument(f"{field}: {what} can't be had with the systemd provider; leave it out")


def limits(wanted: Any) -> list[Property]:
    """LinuxContainerResources that may change while it runs; fields left 0 are left out.

    :raise InvalidArgument: out of bounds, or nothing that systemd has; names the field.
    """
    for field in ("cpu_period", "cpu_shares", "memory_limit_in_bytes"):
        if getattr(wanted, field) < 0:
            raise InvalidArgument(f"resources.{field} {getattr(wanted, field)}: expected 0 or more")
    if not -1000 <= wanted.oom_score_adj <= 1000:
        raise InvalidArgument(f"resources.oom_score_adj {wanted.oom_score_adj}: expected -1000 to 1000")
    found: list[Property] = []
    if wanted.cpu_shares:
        found.append(("CPUWeight", ("t", weight(wanted.cpu_shares))))
    if wanted.cpu_quota:
        period = wanted.cpu_period or CPU_PERIOD
        quota = INFINITY if wanted.cpu_quota < 0 else wanted.cpu_quota * 1_000_000 // period
        found.append(("CPUQuotaPerSecUSec", ("t", quota)))
        found.append(("CPUQuotaPeriodUSec", ("t", period)))
    memory, swap = wanted.memory_limit_in_bytes, wanted.memory_swap_limit_in_bytes
    if memory:
        found.append(("MemoryMax", ("t", memory)))
        # As kubelet means it: no swap unless asked for.
        more = INFINITY if swap < 0 else max(0, swap - memory)
        found.append(("MemorySwapMax", ("t", more)))
    for name, field in (("AllowedCPUs", "cpuset_cpus"), ("AllowedMemoryNodes", "cpuset_mems")):
        if getattr(wanted, field):
            found.append((name, ("ay", _mask(f"resources.{field}", getattr(wanted, field)))))
    for page in wanted.hugepage_limits:
        _refuse(page.limit > 0, "resources.hugepage_limits", "a limit of huge pages")
    for name, value in wanted.unified.items():
        found.append(_unified(name, value))
    return found


_UNIFIED = {"pids.max": "TasksMax", "memory.high": "MemoryHigh", "memory.low": "MemoryLow",
            "memory.min": "MemoryMin"}  # fmt: skip


def _unified(name: str, value: str) -> Property:
    if name not in _UNIFIED:
        known = ", ".join(_UNIFIED)
        raise InvalidArgument(f"resources.unified: {name[:80]!r} can't be had; these can: {known}")
    if value != "max" and not (value.isascii() and value.isdecimal() and len(value) < 20):
        raise InvalidArgument(f"resources.unified: {name} {value[:40]!r}: expected a number, or max")
    return _UNIFIED[name], ("t", INFINITY if value == "max" else min(int(value), INFINITY))


def weight(shares: int) -> int:
    """cgroup v1's shares (2 to 262144) as cgroup v2's weight (1 to 10000), as Kubernetes counts it."""
    return 1 + (min(max(shares, 2), 262144) - 2) * 9999 // 262142


def _mask(field: str, text: str) -> bytes:
    """A kernel's list, "0-2,7", as a set of bits."""
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


def _mounts(config: Any, exists: Callable[[str], bool]) -> list[Property]:
    writable: list[tuple[str, str, bool, int]] = []
    readable: list[tuple[str, str, bool, int]] = []
    targets = []
    for mount in config.mounts:
        field = f"config.mounts {mount.container_path[:200]!r}"
        target = posixpath.normpath(mount.container_path)
        if not target.startswith("/") or target == "/" or "\0" in mount.container_path + mount.host_path:
            raise InvalidArgument(f"{field}: container_path has to be an absolute path below /")
        _refuse(mount.HasField("image"), field, "an image as a volume")
        _refuse(bool(mount.uidMappings or mount.gidMappings), field, "an id-mapped mount")
        _refuse(mount.recursive_read_only, field, "recursive_read_only")
        _refuse(
            mount.propagation == cri.PROPAGATION_BIDIRECTIONAL, field, "mounts that go back to the machine"
        )
        if not mount.host_path.startswith("/") or not exists(mount.host_path):
            raise InvalidArgument(f"{field}: the node has not brought {mount.host_path[:200]!r} into the VM")
        one = (mount.host_path, target, False, RECURSIVE)
        (readable if mount.readonly else writable).append(one)
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


def _security(context: Any) -> list[Property]:
    found: list[Property] = []
    if identity(context) is None and context.run_as_username:
        found.append(("User", ("s", context.run_as_username)))  # systemd says that there is none
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
    if identity(context) is None:  # else setpriv does it, which needs more than it leaves
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


@attrs.frozen
class Identity:
    """Whom a container runs as, in numbers. The machine need not have names for them, which systemd wants."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def identity(context: Any) -> Identity | None:
    """None: root, or a name that the machine does not know.

    :raise InvalidArgument: a number that can't be had."""
    for field, value in (
        ("run_as_user", context.run_as_user.value),
        ("run_as_group", context.run_as_group.value),
        *(("supplemental_groups", group) for group in context.supplemental_groups),
    ):
        if not 0 <= value < 2**32 - 1:
            raise InvalidArgument(f"security_context.{field} {value}: expected 0 to {2**32 - 2}")
    name = context.run_as_username
    if context.HasField("run_as_group") and not (name or context.HasField("run_as_user")):
        raise InvalidArgument("security_context.run_as_group: needs run_as_user or run_as_username beside it")
    known = None
    with contextlib.suppress(KeyError):
        by_name = name and not context.HasField("run_as_user")
        known = pwd.getpwnam(name) if by_name else pwd.getpwuid(context.run_as_user.value)
    if name and not context.HasField("run_as_user"):
        if known is None:
            return None
    elif not context.HasField("run_as_user") and not context.supplemental_groups:
        return None
    uid = known.pw_uid if known is not None else context.run_as_user.value
    gid = known.pw_gid if known is not None else 0
    if context.HasField("run_as_group"):
        gid = context.run_as_group.value
    groups = set(context.supplemental_groups)
    if known is not None and context.supplemental_groups_policy != cri.Strict:
        groups |= set(os.getgrouplist(known.pw_name, known.pw_gid)) if known.pw_uid else set()
    return Identity(uid, gid, tuple(sorted(groups)), known.pw_dir if known is not None else "/")


def setpriv(context: Any) -> list[str]:
    """The command (setpriv(1) of util-linux) that becomes whom a container runs as, with what that may do."""
    found = ["setpriv"]
    who = identity(context)
    if who is not None:
        found += [f"--reuid={who.uid}", f"--regid={who.gid}"]
        found.append(f"--groups={','.join(map(str, who.groups))}" if who.groups else "--clear-groups")
    if not context.privileged:
        bits = capabilities(context.capabilities) & bounding()
        kept = [f"+cap_{bit}" for bit in range(bits.bit_length()) if bits >> bit & 1]
        found.append(f"--bounding-set={','.join(['-all', *kept])}")
    if context.no_new_privs:
        found.append("--no-new-privs")
    return [*found, "--"]


def bounding() -> int:
    """What this process may give: its own bounding set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def _setpriv() -> str:
    path = shutil.which("setpriv", path=DEFAULT_PATH)
    if path is None:
        raise FailedPrecondition("there is no setpriv on this machine: install util-linux")
    return path


def capabilities(wanted: Any) -> int:
    """The bits of what a container may do that is not privileged."""
    added, dropped = _names(wanted.add_capabilities), _names(wanted.drop_capabilities)
    every = set(ALL_CAPABILITIES)
    base = set() if "ALL" in dropped else set(CAPABILITIES) - dropped
    return _capability_bits((base | (every - dropped if "ALL" in added else added)) - {"ALL"})


def _names(words: Sequence[str]) -> set[str]:
    return {word.upper().removeprefix("CAP_") for word in words}


def _capability_bits(words: Any) -> int:
    bits = 0
    for name in _names(words):
        if name not in ALL_CAPABILITIES:
            raise InvalidArgument(f"security_context.capabilities: {name[:80]!r} is no capability")
        bits |= 1 << ALL_CAPABILITIES.index(name)
    return bits
