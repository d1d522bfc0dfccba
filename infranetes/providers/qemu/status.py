# SPDX-License-Identifier: Apache-2.0
"""The status of the provider, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infranetes.providers.interface import InstanceState
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template.template import Template


def describe(
    settings: QemuSettings,
    command_line: CommandLine | None,
    accelerator_reason: str,
    template: Template | None,
    pod_cidr: str,
    states: Sequence[InstanceState],
) -> Mapping[str, str]:
    """`IPodProvider.status`. :param states: those of the node's own VMs."""
    accelerator = f"{command_line.accelerator} ({accelerator_reason})" if command_line else "not chosen yet"
    return {
        "QEMU": command_line.version if command_line else "not started",
        "accelerator": accelerator,
        "guest image": str(template.image.directory) if template else "",
        "template": str(template.directory) if template else "none yet",
        "disk of a VM": f"{settings.disk >> 20} MiB",
        "bridge": settings.bridge,
        "pod CIDR": pod_cidr,
        **{f"VMs {state.value}": str(states.count(state)) for state in InstanceState},
    }
