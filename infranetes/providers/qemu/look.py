# SPDX-License-Identifier: Apache-2.0
"""A look at this machine's KVM, for a check of the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator

from infranetes.providers.qemu import accelerator
from infranetes.providers.qemu.host_checks import kvm_groups, qemu_user
from infranetes.providers.qemu.privileges import QemuUser
from infranetes_common.config_outside import Finding, unseen, warning, wrong
from infranetes_common.errors import FailedPrecondition

_KEY = "accelerator"


def look_at_kvm(setting: str, user: str, is_set: bool) -> Iterator[Finding]:
    """Say why QEMU can't have the device.

    :param setting: of `accelerator`. :param is_set: whether a file has that key."""
    if setting == "tcg":
        return
    if not os.path.exists(accelerator.KVM):
        if setting == "kvm":
            yield wrong(
                f"there is no {accelerator.KVM}: load kvm_intel or kvm_amd, or set it to auto",
                _KEY,
            )
        return
    if closed := accelerator.closed_to(_user(user)):
        yield (wrong if setting == "kvm" else warning)(f"VMs can't use KVM: {closed}", _KEY)
    elif is_set:
        yield unseen("no guest was run to prove that KVM works; the daemon does that", _KEY)


def _user(name: str) -> QemuUser:
    """Return the user; if there is none yet, one as the package makes it, in the group of /dev/kvm."""
    try:
        return qemu_user(name)
    except FailedPrecondition:
        return QemuUser(-1, -1, kvm_groups())
