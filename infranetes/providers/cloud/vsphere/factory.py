# SPDX-License-Identifier: Apache-2.0
"""Make the provider of vSphere. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.interface import ProviderContext
from infranetes.providers.libraries import CLOUDS
from infranetes_common import config
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from infranetes.providers.cloud.vsphere.driver import Driver

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> CloudProvider[Driver]:
    """Make the provider of a vCenter's VMs (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.vsphere")
    if find_spec("pyVmomi") is None:
        raise ConfigError(
            "provider 'vsphere' needs pyVmomi, which libcloud asks vSphere with: " + CLOUDS["vsphere"].remedy
        )
    # Importing pyVmomi takes long: do it before the reactor runs.
    from infranetes.providers.cloud.vsphere.cloud import VsphereCloud

    cloud = VsphereCloud(settings, context)
    return CloudProvider(reactor, cloud, settings, context, cloud.disks, cloud.snapshots)
