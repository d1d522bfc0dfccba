# SPDX-License-Identifier: Apache-2.0
"""The mounting of NFS exports in a VM: the conventions that node and agent share.

The terms are those of Linux's mount table, nfs(5) and fs/nfs/fs_context.c. The VM's kernel mounts by itself:
there is no mount.nfs to ask servers for their version, no rpcbind, and no rpc.statd, so locks of NFSv3 are
not visible to other clients.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import attrs

from infranetes_common.addresses import parse_address
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.volume_disks import OPTIONS as FLAGS

ID = re.compile(r"nfs-[0-9a-f]{32}")
MAX_SOURCE = 2048  # bytes
MAX_OPTIONS = 64
_SOURCE = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z._-]{1,253}):/[^\0-\x1f\x7f]*")
_NUMBER = re.compile(r"[0-9]{1,10}")
_ADDRESS = re.compile(r"[0-9a-fA-F:.]{2,45}")

# Options of the mount, not of the file system, with their flags for mount(2).
MOUNT_FLAGS: Mapping[str, int] = {
    name: FLAGS[name] for name in ("nosuid", "nodev", "noexec", "sync", "noatime", "nodiratime")
}
_PLAIN = frozenset(
    {"hard", "soft", "softerr", "softreval", "posix", "nocto", "noac", "nolock", "noacl", "nordirplus",
     "nosharecache", "noresvport"}
)  # fmt: skip
_VALUES: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(
        ("port", "timeo", "retrans", "rsize", "wsize", "bsize", "acregmin", "acregmax", "acdirmin",
         "acdirmax", "mountport", "nconnect", "max_connect"),
        _NUMBER,
    ),
    "addr": _ADDRESS,
    "mountaddr": _ADDRESS,
    "vers": re.compile(r"3|4\.[0-2]"),
    "mountvers": re.compile(r"3"),
    "proto": re.compile(r"tcp6?"),
    "mountproto": re.compile(r"(tcp|udp)6?"),
    "sec": re.compile(r"sys"),
    "local_lock": re.compile(r"none|all|flock|posix"),
    "lookupcache": re.compile(r"all|none|pos(itive)?"),
    "write": re.compile(r"lazy|eager|wait"),
}  # fmt: skip


@attrs.frozen
class NfsMount:
    """An NFS export to mount, with its options; `checked` makes one.

    :ivar source: SERVER:/EXPORT. :ivar options: in the order of the alphabet."""

    source: str
    options: tuple[str, ...]

    @property
    def id(self) -> str:
        """The id of the volume in its VM: the same for the same mount."""
        words = "\0".join((self.source, *self.options))
        return f"nfs-{hashlib.sha256(words.encode()).hexdigest()[:32]}"

    @property
    def values(self) -> Mapping[str, str]:
        """The options that have a value."""
        return dict(one.split("=", 1) for one in self.options if "=" in one)

    @property
    def address(self) -> str:
        """The server's address."""
        return self.values["addr"]

    @property
    def version(self) -> str:
        """The version of NFS: 3, or 4.x."""
        return self.values["vers"]


def checked(source: str, options: Iterable[str]) -> NfsMount:
    """Return a mount that a VM's kernel can make by itself.

    :raise InvalidArgument: such a mount is impossible.
    :raise FailedPrecondition: a VM can't have it; says why."""
    if len(source.encode()) > MAX_SOURCE or not _SOURCE.fullmatch(source):
        raise InvalidArgument(f"{source[:200]!r} is no SERVER:/EXPORT")
    each = sorted(set(options))
    if len(each) > MAX_OPTIONS:
        raise InvalidArgument(f"{source[:200]}: over {MAX_OPTIONS} mount options")
    names = [option.partition("=")[0] for option in each]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"{source[:200]}: a mount option is given twice: {','.join(each)[:500]}")
    for option in each:
        _check_option(source, option)
    mount = NfsMount(source, tuple(each))
    _check_server(mount)
    _check_locks(mount)
    return mount


def _check_option(source: str, option: str) -> None:
    name, equals, value = option.partition("=")
    if not equals and (name in _PLAIN or name in MOUNT_FLAGS):
        return
    if equals and name in _VALUES and _VALUES[name].fullmatch(value):
        return
    because = {
        "sec": "VMs have no Kerberos: only sec=sys is offered",
        "proto": "only TCP is offered: mount it with proto=tcp",
        "vers": "only the versions 3, 4.0, 4.1 and 4.2 are offered",
    }.get(name, "it is not among the options that are offered to VMs")
    raise FailedPrecondition(f"{source[:200]} is mounted with {option[:80]!r}: {because}")


def _check_server(mount: NfsMount) -> None:
    for name in ("addr", "vers"):
        if name not in mount.values:
            raise InvalidArgument(f"{mount.source[:200]}: the mount option {name}= is missing")
    try:
        address = parse_address(mount.address)
    except ValueError:
        raise InvalidArgument(f"{mount.source[:200]}: {mount.address!r} is no address") from None
    if address.is_loopback or address.is_link_local or address.is_unspecified:
        raise FailedPrecondition(
            f"{mount.source[:200]} is served at {mount.address}, which the VM can't reach: only the node has "
            "that address. Have it mounted by an address that pods can reach"
        )


def _check_locks(mount: NfsMount) -> None:
    if mount.version == "3" and not {"nolock", "local_lock=all"} & set(mount.options):
        raise FailedPrecondition(
            f"{mount.source[:200]} is mounted by NFSv3 with locks, which a VM can't take: use NFSv4 (the "
            "mount option vers=4.2, for instance), or nolock if no program needs locks that others see"
        )
