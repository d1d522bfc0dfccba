"""Pods on VMware vSphere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.errors import ConfigError

__all__ = ["create"]


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> CloudProvider:
    """The provider of a vCenter's VMs (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source="configuration", prefix="providers.vsphere")
    if find_spec("pyVmomi") is None:
        raise ConfigError(
            "provider 'vsphere' needs pyVmomi, which libcloud asks vSphere with: install python3-pyvmomi"
        )
    # pyVmomi takes a moment to be imported, once, before the reactor runs
    from infranetes.providers.cloud.vsphere.cloud import VsphereCloud

    return CloudProvider(reactor, VsphereCloud(settings, context), settings, context)
