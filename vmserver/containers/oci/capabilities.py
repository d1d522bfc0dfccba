# SPDX-License-Identifier: Apache-2.0
"""The capabilities of a container's processes."""

from __future__ import annotations

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import security

# In the order of the numbers in linux/capability.h.
_NAMES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
    SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
    AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
    PERFMON BPF CHECKPOINT_RESTORE
"""
NAMES = tuple(f"CAP_{name}" for name in _NAMES.split())

# A container's capabilities by default, the same as Docker's and containerd's.
_DEFAULT = """
    CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT
    KILL AUDIT_WRITE
"""
DEFAULT = frozenset(f"CAP_{name}" for name in _DEFAULT.split())


@attrs.frozen
class Capabilities:
    """The sets of capabilities: all that a process can gain, and those that it keeps as any user."""

    bounding: tuple[str, ...]
    ambient: tuple[str, ...]

    def sets(self, uid: int) -> dict[str, list[str]]:
        """Return the five sets of a process of user `uid`. Only root has more than the ambient ones."""
        effective = list(self.bounding if uid == 0 else self.ambient)
        return {
            "bounding": list(self.bounding),
            "effective": effective,
            "permitted": effective,
            "inheritable": list(self.ambient),
            "ambient": list(self.ambient),
        }


def in_mask(mask: int) -> frozenset[str]:
    """Return the capabilities of a bit mask of the kernel's."""
    return frozenset(name for number, name in enumerate(NAMES) if mask & 1 << number)


def container_capabilities(
    context: cri.LinuxContainerSecurityContext, supported: frozenset[str]
) -> Capabilities:
    """Return the capabilities of a container's processes.

    :param supported: the capabilities that this machine can grant.
    :raise InvalidArgument: a name is not a capability, or the machine can't grant it.
    """
    requested = context.capabilities
    add, drop = security.capabilities(requested)
    field = "add_ambient_capabilities"
    ambient = [security.capability(name) for name in requested.add_ambient_capabilities]
    for name in (*add, *ambient):
        if name != security.ALL and name not in supported:
            raise InvalidArgument(f"security_context.capabilities: this VM has no {name[:80]}")
    for name in drop:  # the machine may lack a capability that is dropped
        if name != security.ALL and name not in NAMES:
            raise InvalidArgument(f"security_context.capabilities: there is no {name[:80]}")
    chosen = set(supported) if context.privileged else _chosen(add, drop, supported)
    kept = set(supported) if security.ALL in ambient else set(ambient)
    dropped = kept & (set(drop) if not context.privileged else set())
    if dropped:
        raise InvalidArgument(
            f"security_context.capabilities.{field}: {sorted(dropped)[0]} is in drop_capabilities too"
        )
    return Capabilities(_in_order(chosen | kept), _in_order(kept))


def _chosen(add: list[str], drop: list[str], supported: frozenset[str]) -> set[str]:
    if security.ALL in add:
        return set(supported) - set(drop)
    if security.ALL in drop:
        return set(add)
    return ((set(supported) & DEFAULT) - set(drop)) | set(add)


def _in_order(names: set[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name in names)
