# SPDX-License-Identifier: Apache-2.0
"""Make the provider of Azure. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.cloud.azure.cloud import AzureCloud
from infranetes.providers.cloud.azure.disks import AzureDisks
from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.names import Group
from infranetes.providers.cloud.azure.offers import AzureOffers
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.azure.snapshots import AzureSnapshots
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.reactors import IReactor

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> CloudProvider[Driver]:
    """Make the provider of Azure's virtual machines (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.azure")
    own = OwnPrices(settings.prices_file, f"{context.source}: providers.azure.prices_file")
    group = Group(settings.subscription, settings.resource_group)
    book = OfferBook(context.state_dir / "azure" / "offers.json", AzureOffers(settings, group), own.prices)
    own.tell(book.use_own)
    cloud = AzureCloud(settings, context, book)
    disks = AzureDisks(settings, group, context.cluster)
    snapshots = AzureSnapshots(settings, group, context.cluster)
    return CloudProvider(reactor, cloud, settings, context, disks, snapshots, book, own)
