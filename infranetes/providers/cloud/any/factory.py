# SPDX-License-Identifier: Apache-2.0
"""Make the provider of libcloud's drivers. Only this module imports what the cloud is called with."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.cloud.any.cloud import AnyCloud
from infranetes.providers.cloud.any.credentials import Session
from infranetes.providers.cloud.any.settings import Settings
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.reactors import IReactor

__all__ = ["create"]


def create(
    reactor: IReactor, table: Mapping[str, object], context: ProviderContext
) -> CloudProvider[Session]:
    """Make the provider of a driver's nodes (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source=context.source, prefix="providers.libcloud")
    own = OwnPrices(settings.prices_file, f"{context.source}: providers.libcloud.prices_file")
    cloud = AnyCloud(settings, context, own.prices)
    own.tell(cloud.use_prices)
    return CloudProvider(reactor, cloud, settings, context, own=own)
