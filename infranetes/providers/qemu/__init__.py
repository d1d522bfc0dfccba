# SPDX-License-Identifier: Apache-2.0
"""The default provider: pods as QEMU virtual machines on this node, cloned from a template.

Each room uses those above it alone, and `provider` uses them all:

host        what the node gives to VMs besides its networks and files: users, and KVM
network     the pods' network on the node: the bridge with its tables, namespaces of other programs
dhcp        VMs that know nothing of their network are told, each on its own tap
settings    the configuration
program     QEMU as a program: its command line, open files, process and sockets
vm          a VM as the daemon knows it: its record, its files, the hardware that it has while it runs
cgroups     the control groups that VMs' processes are put into
template    the VM that is booted once, of which all others are clones
volumes     volumes of this node, their snapshots, and how VMs have them
keep        VMs are kept as they run, and become what others start from
launch      VMs are made, connected, found again and ended
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infranetes_common import config
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from infranetes.providers.interface import ProviderContext
    from infranetes.providers.qemu.provider import QemuProvider

_MAX_SOCKET_PATH = 107  # unix(7)
_LONGEST_SOCKET = "0" * 32 + "/identity"


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> QemuProvider:
    """Make the provider; a `registry.ProviderFactory`."""
    # Imported late: commands that read the configuration import modules of this package, and run no VM.
    from infranetes.providers.qemu.provider import QemuProvider
    from infranetes.providers.qemu.settings import QemuSettings

    settings = config.structure(table, QemuSettings, source=context.source, prefix="providers.qemu")
    socket = context.run_dir / QemuProvider.name / _LONGEST_SOCKET
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{context.source}: run_dir: {socket} is too long for a socket's path "
            f"(at most {_MAX_SOCKET_PATH} bytes); choose a shorter directory"
        )
    return QemuProvider(reactor, settings, context)
