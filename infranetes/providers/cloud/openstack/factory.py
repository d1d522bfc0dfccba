# SPDX-License-Identifier: Apache-2.0
"""Make the provider of OpenStack. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.openstack.cloud import OpenStackCloud
from infranetes.providers.cloud.openstack.disks import OpenStackDisks
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.settings import Settings
from infranetes.providers.cloud.openstack.snapshots import OpenStackSnapshots
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.reactors import IReactor

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> CloudProvider[Driver]:
    """Make the provider of Nova's servers (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.openstack")
    own = OwnPrices(settings.prices_file, f"{context.source}: providers.openstack.prices_file")
    cloud = OpenStackCloud(settings, context, own.prices)
    own.tell(cloud.use_prices)
    disks = OpenStackDisks(settings, context.cluster)
    snapshots = OpenStackSnapshots(context.cluster)
    return CloudProvider(reactor, cloud, settings, context, disks, snapshots, own=own)
