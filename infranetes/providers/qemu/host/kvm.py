# SPDX-License-Identifier: Apache-2.0
"""The device of KVM, and QEMU's user, who has to be allowed to open it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence

from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes_common.config_outside import Finding, unseen, warning, wrong
from infranetes_common.errors import FailedPrecondition

KVM = "/dev/kvm"
_KEY = "accelerator"


def qemu_user(name: str) -> QemuUser:
    """Look up the user that QEMU runs as, with /dev/kvm's group if that group may use it.

    :param name: a number is a user ID, and the group ID too, that need not be in the node's list of users.
    :raise FailedPrecondition: there is no such user; says how to make it.
    """
    if name.isascii() and name.isdecimal():
        return QemuUser(int(name), int(name), kvm_groups())
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise FailedPrecondition(
            f"there is no user {name} for QEMU to run as; make it with "
            f"`useradd --system --shell /usr/sbin/nologin {name}`, or set providers.qemu.user"
        ) from None
    return QemuUser(entry.pw_uid, entry.pw_gid, kvm_groups())


def kvm_groups() -> list[int]:
    """Return the group of /dev/kvm, as a list, if that group may use it."""
    try:
        status = os.stat(KVM)
        if status.st_mode & 0o060 == 0o060 and status.st_gid != 0:
            return [grp.getgrgid(status.st_gid).gr_gid]
    except (OSError, KeyError):
        pass
    return []


def closed_to(user: QemuUser) -> str:
    """Return why a user may not open the device, and what would mend it; "": the user may."""
    status = os.stat(KVM)
    mode = stat.S_IMODE(status.st_mode)
    if user.uid == status.st_uid:
        permissions = mode >> 6
    elif status.st_gid in (user.gid, *user.groups):
        permissions = mode >> 3
    else:
        permissions = mode
    if user.uid == 0 or permissions & 0o6 == 0o6:
        return ""
    names = f"{_name(pwd.getpwuid, status.st_uid)}:{_name(grp.getgrgid, status.st_gid)}"
    return (
        f"{KVM} belongs to {names} with mode {mode:04o}, so that QEMU's user may not open it: "
        f"`chgrp kvm {KVM} && chmod 0660 {KVM}`, and for the next boot a udev rule "
        """`KERNEL=="kvm", GROUP="kvm", MODE="0660"`; then restart the daemon"""
    )


def _name(look_up: Callable[[int], Sequence[object]], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def look_at_kvm(setting: str, user: str, is_set: bool) -> Iterator[Finding]:
    """Say why QEMU can't have the device.

    :param setting: of `accelerator`. :param is_set: whether a file has that key."""
    if setting == "tcg":
        return
    if not os.path.exists(KVM):
        if setting == "kvm":
            yield wrong(
                f"there is no {KVM}: load kvm_intel or kvm_amd, or set it to auto",
                _KEY,
            )
        return
    if closed := closed_to(_user(user)):
        yield (wrong if setting == "kvm" else warning)(f"VMs can't use KVM: {closed}", _KEY)
    elif is_set:
        yield unseen("no guest was run to prove that KVM works; the daemon does that", _KEY)


def _user(name: str) -> QemuUser:
    """Return the user; if there is none yet, one as the package makes it, in the group of /dev/kvm."""
    try:
        return qemu_user(name)
    except FailedPrecondition:
        return QemuUser(-1, -1, kvm_groups())
