# SPDX-License-Identifier: Apache-2.0
"""The user, groups and capabilities that a container runs with."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

# A container's capabilities by default, the same as Docker's and containerd's.
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
)  # fmt: skip
# In the order of the numbers in linux/capability.h.
ALL_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip


@attrs.frozen
class UserIds:
    """The numeric user and groups of a container. systemd takes names only, which the VM may not have."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def identity(context: cri.LinuxContainerSecurityContext) -> UserIds | None:
    """Return the configured user and groups; None for root, or for a name that the VM does not have.

    :raise InvalidArgument: an id is out of range."""
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
    return UserIds(uid, gid, tuple(sorted(groups)), known.pw_dir if known is not None else "/")


def setpriv(context: cri.LinuxContainerSecurityContext) -> list[str]:
    """Return the arguments of setpriv(1) that set the configured user, groups and capabilities."""
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
    """Return this process's own bounding set, which limits what it can grant."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def capabilities(requested: cri.Capability) -> int:
    """Return the capabilities of an unprivileged container, as bits."""
    added, dropped = _names(requested.add_capabilities), _names(requested.drop_capabilities)
    every = set(ALL_CAPABILITIES)
    base = set() if "ALL" in dropped else set(CAPABILITIES) - dropped
    return _capability_bits((base | (every - dropped if "ALL" in added else added)) - {"ALL"})


def _names(words: Iterable[str]) -> set[str]:
    return {word.upper().removeprefix("CAP_") for word in words}


def _capability_bits(words: Iterable[str]) -> int:
    bits = 0
    for name in _names(words):
        if name not in ALL_CAPABILITIES:
            raise InvalidArgument(f"security_context.capabilities: {name[:80]!r} is not a capability")
        bits |= 1 << ALL_CAPABILITIES.index(name)
    return bits
