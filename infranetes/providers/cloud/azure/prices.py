# SPDX-License-Identifier: Apache-2.0
"""Azure's retail prices, which everybody may read: no token is sent (source: "Azure Retail Prices REST API").

libcloud's own call for prices (RateCard) needs an offer's number and a permission, and is being retired.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TypedDict
from urllib.parse import parse_qsl, urlsplit

from libcloud.common.base import Connection

from infranetes.providers.cloud.calls.connections import close_sockets, connection_arguments
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.offers.price_page import PricePage

_HOST = "https://prices.azure.com"
_PATH = "/api/retail/prices"
_VERSION = "2023-01-01-preview"
_MAX_PAGES = 200
# Words in the names of products and meters that are not for a Linux VM on demand.
_OTHER_PRODUCTS = ("Windows", "Cloud Services", "CloudServices", "Dedicated Host")
_OTHER_METERS = ("Spot", "Low Priority", "Expired")


class Item(TypedDict, total=False):
    """One price."""

    armSkuName: str
    productName: str
    skuName: str
    meterName: str
    unitOfMeasure: str
    type: str
    currencyCode: str
    isPrimaryMeterRegion: bool
    retailPrice: float


class _Response(PricePage):
    def parse_error(self) -> str:
        try:
            return str(json.loads(self.body)["Error"]["Message"])[:200]
        except (ValueError, KeyError, TypeError):
            return f"the price list answers {self.status}"


class _Connection(Connection):  # type: ignore[misc]
    responseCls = _Response


class RetailPrices:
    """A connection to the API, for one thread. :param endpoint: the one to use in place of Azure's own; "":
    Azure's own."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        self._connection = _Connection(timeout=timeout, **connection_arguments(endpoint or _HOST))
        self._connection.connect()

    def _thd_of_vms(self, location: str) -> dict[str, float]:
        """Return the US dollars of an hour of VMs with Linux, on demand, by their sizes."""
        return prices_of(self._thd_items(location))

    def _thd_items(self, location: str) -> Iterator[Item]:
        wanted = (
            f"serviceName eq 'Virtual Machines' and armRegionName eq '{location}' "
            "and priceType eq 'Consumption'"
        )
        query: Mapping[str, str] = {"api-version": _VERSION, "currencyCode": "'USD'", "$filter": wanted}
        for _ in range(_MAX_PAGES):
            answer = self._connection.request(_PATH, params=dict(query), retry_failed=False).object
            yield from answer["Items"]
            following = answer.get("NextPageLink") or ""
            if not following:
                return
            query = dict(parse_qsl(urlsplit(following).query))
        raise CloudError(ErrorKind.UNEXPECTED, "Azure's list of prices does not end")

    def close(self) -> None:
        """Close the connection."""
        close_sockets(self._connection)


def prices_of(items: Iterable[Item]) -> dict[str, float]:
    """Return the prices of sizes. One meter may be for several sizes, such as E16 v3 and E16s v3, and is
    primary for one of them: a size's price of a meter that is not primary counts only if it has no primary
    one."""
    found: dict[str, tuple[bool, float]] = {}
    for item in items:
        price = price_of(item)
        if price is not None:
            name, this = item["armSkuName"], (item.get("isPrimaryMeterRegion", True), price)
            found[name] = max(this, found.get(name, this))
    return {name: price for name, (_, price) in found.items()}


def price_of(item: Item) -> float | None:
    """Return the price if it is that of a VM with Linux, on demand; None: it is another."""
    meter = f"{item.get('skuName', '')} {item.get('meterName', '')}"
    is_ours = (
        item.get("type") == "Consumption"
        and item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and bool(item.get("armSkuName"))
        and not any(word in item.get("productName", "") for word in _OTHER_PRODUCTS)
        and not any(word in meter for word in _OTHER_METERS)
    )
    return float(item["retailPrice"]) if is_ours else None
