# SPDX-License-Identifier: Apache-2.0
"""Azure's own data on its sizes: from Resource Manager their properties and zones, from the retail prices
their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.images import takes_confidential
from infranetes.providers.cloud.azure.names import Group, definition_of
from infranetes.providers.cloud.azure.prices import RetailPrices
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.azure.sizes import Requirements, offers
from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer
from infranetes.providers.cloud.offers.book import Sources

_PRICE_SECONDS = 10.0  # the timeout of one page of prices


class AzureOffers:
    """See `OfferSource`."""

    def __init__(self, settings: Settings, group: Group) -> None:
        self._settings = settings
        self._group = group
        zones = "in zones" if settings.zones else "in no zone"
        self.sources = Sources(
            # Everything that decides which sizes can be used.
            f"azure {settings.location}, {settings.image} on {settings.disk_type} with "
            f"{settings.volume_type} {zones} of {group.path}",
            "Azure",
            "Azure's retail prices",
            "nobody",
        )

    def _thd_types(self, driver: Driver) -> Sequence[Offer]:
        settings = self._settings
        image = driver.image(definition_of(self._group.image(settings.image)))
        if image is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no image {settings.image}")
        requirements = Requirements(
            settings.location,
            image["properties"].get("hyperVGeneration") or "V1",
            premium="Premium" in settings.disk_type + settings.volume_type,
            zonal=bool(settings.zones),
            confidential=takes_confidential(image),
        )
        return offers(driver.skus(settings.location), requirements)

    def _thd_prices(self, driver: Driver, offers: Sequence[Offer]) -> Mapping[str, float]:
        settings = self._settings
        if settings.environment == "AzureChinaCloud" and not settings.price_endpoint:
            raise CloudError(
                ErrorKind.INVALID, "Azure publishes no prices for China; see prices_file in providers.azure"
            )
        prices = RetailPrices(settings.price_endpoint, min(_PRICE_SECONDS, settings.call_seconds))
        try:
            names = {offer.name for offer in offers}
            found = prices._thd_of_vms(settings.location)
            return {name: price for name, price in found.items() if name in names}
        finally:
            prices.close()

    def _thd_bundled(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        return ()
