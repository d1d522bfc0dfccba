"""The ContainerProvider whose containers are transient units of the machine's systemd.

A container's image is one executable, known by its checksum and fetched by its URL over https. It sees the
machine's own files, with the pod's mounts on top, and has the limits, user and capabilities that were asked
for. What it writes is in the machine's journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes_common import config as common
from vmserver.containers import ProviderContext
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.provider import SystemdProvider


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> SystemdProvider:
    """The ProviderFactory of `systemd`."""
    config = common.structure(table, SystemdConfig, source="configuration", prefix="providers.systemd")
    return SystemdProvider(reactor, config, context.run_dir / "systemd")
