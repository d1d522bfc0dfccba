# SPDX-License-Identifier: Apache-2.0
"""A simulated Cloud Billing Catalog API. Google's own description checks requests and answers; prices are
those that Google published when libcloud was released, unless a test sets others."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from infranetes.providers.cloud.gcp.sizes import prices
from tests.support.clouds import discovery
from tests.support.clouds.gce_resources import REGION
from tests.support.clouds.http_sites import Answer

PATH = "/v1/services/6F81-5844-456A/skus"
_NAMES = {"e2": "E2", "n2": "N2", "n2d": "N2D AMD", "n1": "N1 Predefined"}
_PARTS = {"cpu": ("Core", "h"), "ram": ("Ram", "GiBy.h")}


def sku(description: str, unit: str, price: float, region: str = REGION, usage: str = "OnDemand") -> Any:
    """Return a SKU as the API has it (source: Cloud Billing API reference, `services.skus.list`)."""
    rate = {
        "startUsageAmount": 0,
        "unitPrice": {
            "currencyCode": "USD",
            "units": str(int(price)),
            "nanos": round((price - int(price)) * 1e9),
        },
    }
    return {
        "name": "services/6F81-5844-456A/skus/0000-0000-0000",
        "skuId": "0000-0000-0000",
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": "CPU",
            "usageType": usage,
        },
        "serviceRegions": [region],
        "pricingInfo": [
            {
                "summary": "",
                "pricingExpression": {"usageUnit": unit, "displayQuantity": 1, "tieredRates": [rate]},
                "currencyConversionRate": 1,
                "effectiveTime": "2026-11-01T00:00:00Z",
            }
        ],
        "serviceProviderName": "Google",
    }


class SimulatedGcePriceList:
    """The API. :ivar skus: None: those of libcloud, and others. :ivar page: the most that an answer has.
    :ivar answers: answers in place of its own, one for each request. :ivar malformed: faults of requests and
        answers by its description. :ivar tokens: the tokens that it accepts. :ivar requests: the queries.
    :ivar enabled: whether the project has the API."""

    def __init__(self) -> None:
        self.skus: list[Any] | None = None
        self.page = 5000
        self.answers: list[Answer] = []
        self.malformed: list[str] = []
        self.requests: list[dict[str, str]] = []
        self.tokens: set[str] = set()
        self.enabled = True

    def answer(self, request: Any) -> Answer:
        """Return the API's answer."""
        query = dict(parse_qsl(urlsplit(request.uri.decode()).query, keep_blank_values=True))
        self.requests.append(query)
        if self.answers:
            return self.answers.pop(0)
        bearer = (request.getHeader("Authorization") or "").removeprefix("Bearer ")
        if bearer not in self.tokens or not self.enabled:
            return 403, b'{"error": {"code": 403, "message": "Cloud Billing API has not been used"}}'
        found = self.skus if self.skus is not None else _usual()
        first = int(query.get("pageToken", "0"))
        end = first + min(int(query.get("pageSize", "5000")), self.page)
        said = {"skus": found[first:end], "nextPageToken": str(end) if end < len(found) else ""}
        self.malformed += discovery.billing().wrong("GET", PATH[1:], query, {}, said)
        return 200, json.dumps(said).encode()


def _usual() -> list[Any]:
    found = []
    for family, name in _NAMES.items():
        for part, (words, unit) in _PARTS.items():
            price = float(prices()[family][part]["on_demand"][REGION]["price"])
            usual = f"{name} Instance {words} running in Belgium"
            found += [
                sku(f"Spot Preemptible {usual}", unit, price / 4, usage="Preemptible"),
                sku(f"{name} Custom Instance {words} running in Belgium", unit, price * 1.05),
                sku(f"{name} Instance {words} running in Warsaw", unit, price * 2, region="europe-central2"),
                sku(usual, unit, price),
                sku(
                    f"Commitment v1: {name} {words} in Belgium for 1 Year", unit, price / 2, usage="Commit1Yr"
                ),
            ]
    return [*found, sku("Network Internet Egress from EMEA", "GiBy", 0.12)]
