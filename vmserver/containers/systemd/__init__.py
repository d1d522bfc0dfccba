# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider whose containers are transient units of the VM's systemd.

A container's image is one executable, identified by its checksum and downloaded over https. The container
sees the VM's own files with the pod's mounts on top, and has the limits, user and capabilities of its
configuration. Its output goes to the VM's journal.
"""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common import config as common
from infranetes_common.reactors import IReactor
from vmserver.containers import ProviderContext
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.provider import SystemdProvider


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> SystemdProvider:
    """Make the provider: the ProviderFactory of `systemd`."""
    config = common.structure(table, SystemdConfig, source=context.source, prefix="providers.systemd")
    return SystemdProvider(reactor, config, context.run_dir / "systemd")
