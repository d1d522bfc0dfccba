# SPDX-License-Identifier: Apache-2.0
"""Simulated retail prices of Azure (source: "Azure Retail Prices REST API", its sample responses)."""

from __future__ import annotations

import json
from typing import Any

from tests.support.clouds.azure_resources import LOCATION
from tests.support.clouds.http_sites import Answer

_VERSION = "2023-01-01-preview"
_FILTER = (
    f"serviceName eq 'Virtual Machines' and armRegionName eq '{LOCATION}' and priceType eq 'Consumption'"
)


def item(size: str, price: float, **fields: Any) -> dict[str, Any]:
    """Return a price as the API has it. :param fields: other values than those of Linux on demand."""
    short = size.removeprefix("Standard_").replace("_", " ")
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": LOCATION,
        "location": "EU West",
        "effectiveStartDate": "2024-01-01T00:00:00Z",
        "meterId": "00000000-0000-0000-0000-000000000001",
        "meterName": short,
        "productId": "DZH318Z0BQPS",
        "skuId": "DZH318Z0BQPS/00TG",
        "productName": f"Virtual Machines {short} Series",
        "skuName": short,
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": size,
        **fields,
    }


class SimulatedRetailPrices:
    """The API. :ivar items: its prices. :ivar page: its pages' length. :ivar broken: whether it fails."""

    def __init__(self) -> None:
        self.items = [
            item("Standard_B1ls", 0.006),
            item("Standard_B1s", 0.012),
            item("Standard_B2s", 0.048),
            item("Standard_D2s_v5", 0.115),
            item("Standard_D4s_v5", 0.23),
            item("Standard_D8s_v5", 0.46),
        ]
        self.page = 4
        self.broken = False
        self.endpoint = ""
        self.asked = 0

    def answer(self, query: dict[str, str]) -> Answer:
        """Serve a request."""
        self.asked += 1
        begin = int(query.pop("$skip", "0"))
        expected = {"api-version": _VERSION, "currencyCode": "'USD'", "$filter": _FILTER}
        if self.broken or query != expected:
            return 400, json.dumps({"Error": {"Code": "BadRequest", "Message": "Invalid OData"}}).encode()
        shown, end = self.items[begin : begin + self.page], begin + self.page
        following = None
        if end < len(self.items):
            words = "&".join(f"{key}={value}".replace(" ", "%20") for key, value in expected.items())
            following = f"{self.endpoint}/api/retail/prices?{words}&$skip={end}"
        answer = {
            "BillingCurrency": "USD",
            "CustomerEntityId": "Default",
            "CustomerEntityType": "Retail",
            "Items": shown,
            "NextPageLink": following,
            "Count": len(shown),
        }
        return 200, json.dumps(answer).encode()
