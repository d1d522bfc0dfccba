# SPDX-License-Identifier: Apache-2.0
"""Google's own data on machine types: from Compute Engine their properties and zones, from the price list the
cost of their cores and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import libcloud

from infranetes.providers.cloud.gcp.credentials import Credentials
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import region_of
from infranetes.providers.cloud.gcp.price_list import SCOPE, PriceList
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.sizes import _thd_types, bundled_price
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.cloud.offers.book import Sources

_PRICE_SECONDS = 10.0  # the timeout of one page of the price list


class GcpOffers:
    """See `OfferSource`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._region = region_of(settings.zones[0])
        self._credentials = Credentials(settings, SCOPE)
        location = f"gcp {settings.project} {', '.join(settings.zones)}"
        bundled = f"libcloud {libcloud.__version__}"
        self.sources = Sources(location, "Compute Engine", "Google's price list", bundled)

    def _thd_types(self, driver: Driver) -> Sequence[Offer]:
        found: dict[str, Offer] = {}
        for zone in self._settings.zones:
            for name, offer in _thd_types(driver, zone).items():
                known = found.get(name, offer)
                found[name] = attrs.evolve(known, zones=(*known.zones, zone))
        return list(found.values())

    def _thd_prices(self, driver: Driver, offers: Sequence[Offer]) -> Mapping[str, float]:
        timeout = min(_PRICE_SECONDS, self._settings.call_seconds)
        prices = PriceList(self._credentials, timeout, self._settings.price_endpoint)
        try:
            rates = prices._thd_rates(self._region)
        finally:
            prices.close()
        found = {offer.name: rates.of(offer) for offer in offers}
        return {name: price for name, price in found.items() if price is not None}

    def _thd_bundled(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        return [attrs.evolve(each, price=bundled_price(each, self._region)) for each in offers]
