# SPDX-License-Identifier: Apache-2.0
"""A look at this machine's KVM, for a check of the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator

from infranetes.providers.qemu import accelerator
from infranetes.providers.qemu.host_checks import kvm_groups, qemu_user
from infranetes.providers.qemu.privileges import QemuUser
from infranetes_common.config_outside import Said, unseen, warning, wrong
from infranetes_common.errors import FailedPrecondition

_KEY = "accelerator"


def look_at_kvm(wanted: str, user: str, given: bool) -> Iterator[Said]:
    """Say why QEMU can't have the device. :param given: whether a file says what is wanted."""
    if wanted == "tcg":
        return
    if not os.path.exists(accelerator.KVM):
        if wanted == "kvm":
            yield wrong(
                f"there is no {accelerator.KVM}: load kvm_intel or kvm_amd, or set it to auto",
                _KEY,
            )
        return
    if closed := accelerator.closed_to(_user(user)):
        yield (wrong if wanted == "kvm" else warning)(f"VMs can't use KVM: {closed}", _KEY)
    elif given:
        yield unseen("no guest was run to prove that KVM works; the daemon does that", _KEY)


def _user(name: str) -> QemuUser:
    """Return the user, or one that has nothing but the device's group: the package will make it so."""
    try:
        return qemu_user(name)
    except FailedPrecondition:
        return QemuUser(-1, -1, kvm_groups())
