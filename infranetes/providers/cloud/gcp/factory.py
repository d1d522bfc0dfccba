# SPDX-License-Identifier: Apache-2.0
"""Make the provider of Compute Engine. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.gcp.disks import GcpDisks
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.offers import GcpOffers
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.snapshots import GcpSnapshots
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.reactors import IReactor

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> CloudProvider[Driver]:
    """Make the provider of Compute Engine's instances (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.gcp")
    own = OwnPrices(settings.prices_file, f"{context.source}: providers.gcp.prices_file")
    book = OfferBook(context.state_dir / "gcp" / "offers.json", GcpOffers(settings), own.prices)
    own.tell(book.use_own)
    cloud = GcpCloud(settings, context, book)
    disks = GcpDisks(settings, context.cluster)
    snapshots = GcpSnapshots(settings, context.cluster)
    return CloudProvider(reactor, cloud, settings, context, disks, snapshots, book, own)
