# SPDX-License-Identifier: Apache-2.0
"""AWS' Price List Query API, which libcloud has no call for; its connection signs and sends.

botocore has the call, but is not installed on every node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import attrs
from libcloud.common.aws import SignedAWSConnection

from infranetes.providers.cloud.aws.credentials import Keys
from infranetes.providers.cloud.aws.regions import Endpoint
from infranetes.providers.cloud.calls.connections import close_sockets, connection_arguments
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.offers.price_page import PricePage

_TARGET = "AWSPriceListService.GetProducts"
_MAX_PAGES = 100
_PAGE = 100  # products in one page; the API allows no more
# What RunInstances gives by default: Linux, billed by the second, on shared hardware, without licences.
_ON_DEMAND = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


class _Answer(Protocol):
    object: Mapping[str, object]


class _Response(PricePage):
    """An answer of the API, whose errors are put into the form of EC2's: `CODE: MESSAGE`."""

    def parse_error(self) -> str:
        try:
            said = json.loads(self.body)
            code = str(said["__type"]).rpartition("#")[2]
            return f"{code}: {said.get('message') or said.get('Message') or ''}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"the price list answers {self.status}"


@attrs.frozen
class _Signer:
    """The part of a driver that libcloud's connection uses: for its signature, and for its name to AWS."""

    region_name: str
    name: str = "AWS Price List"


class _Connection(SignedAWSConnection):  # type: ignore[misc]
    service_name = "pricing"
    responseCls = _Response

    def add_default_params(self, params: dict[str, str]) -> dict[str, str]:
        return params  # libcloud would put the session's token into the URL


class PriceList:
    """A connection to AWS' price list API. Must be used by one thread only.

    :param endpoint: a URL to connect to instead of AWS' own endpoint; "": AWS' own."""

    def __init__(self, where: Endpoint, keys: Keys, timeout: float, endpoint: str) -> None:
        # Any: libcloud has no types.
        arguments: dict[str, Any] = {"host": where.host, **connection_arguments(endpoint)}
        self._connection = _Connection(
            keys.access_key,
            keys.secret_key,
            token=keys.token,
            timeout=timeout,
            signature_version="4",
            **arguments,
        )
        self._connection.driver = _Signer(where.region)

    def close(self) -> None:
        """Close the sockets."""
        close_sockets(self._connection)

    def _thd_on_demand(self, region: str, currency: str) -> dict[str, float]:
        """Return a region's prices of an hour on demand, by instance types."""
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in {**_ON_DEMAND, "regionCode": region}.items()
        ]
        request = {
            "ServiceCode": "AmazonEC2",
            "FormatVersion": "aws_v1",
            "Filters": filters,
            "MaxResults": _PAGE,
        }
        found: dict[str, float] = {}
        for product in self._products(request):
            priced = price_of(product, currency)
            if priced is not None:
                name, price = priced
                found[name] = min(price, found.get(name, price))
        return found

    def _products(self, request: Mapping[str, object]) -> Iterator[object]:
        token: object = None
        for _ in range(_MAX_PAGES):
            products, token = self._page({**request, "NextToken": token} if token else request)
            yield from products
            if not token:
                return
        raise CloudError(ErrorKind.INVALID, "the price list does not end")

    def _page(self, request: Mapping[str, object]) -> tuple[list[object], object]:
        """Ask for one page of the price list; return its products, and the next page's token or None."""
        answer: _Answer = self._connection.request(
            "/",
            method="POST",
            data=json.dumps(request),
            headers={"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": _TARGET},
            retry_failed=False,
        )
        page = answer.object
        if not isinstance(page, dict) or not isinstance(page.get("PriceList"), list):
            raise CloudError(ErrorKind.INVALID, "the price list's answer has no PriceList")
        return page["PriceList"], page.get("NextToken")


def price_of(product: object, currency: str) -> tuple[str, float] | None:
    """Return a product's instance type, and the price of its first hour on demand; None: it has none.

    :param product: JSON, as the API has it: an item of a list of prices."""
    try:
        # Any: its form is checked below.
        said: Any = json.loads(product) if isinstance(product, str) else product
        name = said["product"]["attributes"]["instanceType"]
        prices = [
            float(dimension["pricePerUnit"][currency])
            for term in said["terms"]["OnDemand"].values()
            for dimension in term["priceDimensions"].values()
            if dimension["unit"] == "Hrs" and dimension.get("beginRange", "0") == "0"
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    found = [price for price in prices if price > 0]
    return (str(name), min(found)) if found else None
