# SPDX-License-Identifier: Apache-2.0
"""Make the provider of EC2. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.cloud.aws.cloud import AwsCloud
from infranetes.providers.cloud.aws.disks import AwsDisks
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.offers import AwsOffers
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.aws.snapshots import AwsSnapshots
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.reactors import IReactor

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> CloudProvider[Driver]:
    """Make the provider of EC2 instances (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.aws")
    own = OwnPrices(settings.prices_file, f"{context.source}: providers.aws.prices_file")
    book = OfferBook(context.state_dir / "aws" / "offers.json", AwsOffers(settings), own.prices)
    own.tell(book.use_own)
    cloud = AwsCloud(settings, context, book)
    disks = AwsDisks(settings, context.cluster, cloud.first_zone)
    snapshots = AwsSnapshots(context.cluster)
    return CloudProvider(reactor, cloud, settings, context, disks, snapshots, book, own)
