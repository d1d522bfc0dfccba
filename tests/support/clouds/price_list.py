# SPDX-License-Identifier: Apache-2.0
"""A simulated Price List Query API of AWS. botocore's model checks the requests and its own answers; prices
are those that AWS published when libcloud was released, unless a test sets others."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from typing import Any

from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from infranetes.providers.cloud.aws import bundled
from tests.support.clouds import ec2_model, ec2_types
from tests.support.clouds.http_sites import Answer

_TARGET = "AWSPriceListService.GetProducts"
_MODEL = "pricing/2017-10-15/service-2.json.gz"


@lru_cache
def _operation() -> Any:
    file = ec2_model._file().parents[2] / _MODEL
    return ServiceModel(json.loads(gzip.decompress(file.read_bytes())), "pricing").operation_model(
        "GetProducts"
    )


def wrong(shape: Any, value: object) -> list[str]:
    """Describe what in a request or an answer does not conform to botocore's model."""
    report: str = ParamValidator().validate(value, shape).generate_report()
    unknown = set(value) - set(shape.members) if isinstance(value, dict) else ()
    return [*report.splitlines(), *(f"unknown: {name}" for name in unknown)]


def product(name: str, region: str, price: float, currency: str = "USD", **attributes: str) -> str:
    """Return a product as the API has it (source: AWS Billing User Guide, "Reading the price list files")."""
    sku = f"SKU{abs(hash(name)) % 10**10:010d}"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"{price} per On Demand Linux {name} Instance Hour",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": {currency: f"{price:.10f}"},
    }
    has = {
        "instanceType": name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        **attributes,
    }
    terms = {f"{sku}.JRTCKXETXF": {"sku": sku, "priceDimensions": {"d": dimension}, "termAttributes": {}}}
    shown = {"productFamily": "Compute Instance", "attributes": has, "sku": sku}
    return json.dumps({"product": shown, "serviceCode": "AmazonEC2", "terms": {"OnDemand": terms}})


class SimulatedPriceList:
    """:ivar prices: of the types; None: libcloud's, of a few types. :ivar page: the products in a page.
    :ivar answers: used instead of its own, one for each request; None: the connection breaks.
    :ivar requests: the bodies. :ivar headers: the requests'. :ivar malformed: what does not conform."""

    def __init__(self) -> None:
        self.prices: dict[str, float] | None = None
        self.page = 100
        self.answers: list[Answer | None] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.malformed: list[str] = []

    def answer(self, request: Any) -> Answer:
        """Return the API's answer. :raise ConnectionError: the connection breaks instead."""
        asked = json.loads(request.content.read())
        self.requests.append(asked)
        headers = {key.decode().lower(): b",".join(value).decode() for key, value in _headers(request)}
        self.headers.append(headers)
        if self.answers:
            given = self.answers.pop(0)
            if given is None:
                raise ConnectionError
            return given
        bad = wrong(_operation().input_shape, asked)
        if headers["x-amz-target"] != _TARGET or "/pricing/aws4_request" not in headers["authorization"]:
            bad.append(f"it is for {headers['x-amz-target']}")
        if bad:
            self.malformed += bad
            return 400, json.dumps({"__type": "ValidationException", "message": "; ".join(bad)}).encode()
        said = self._products(asked)
        assert not wrong(_operation().output_shape, said)
        return 200, json.dumps(said).encode()

    def _products(self, asked: dict[str, Any]) -> dict[str, Any]:
        wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
        region = wanted["regionCode"]
        prices = self.prices
        if prices is None:
            listed = bundled.offers(region)
            prices = {one.name: one.price for one in listed if one.price and one.name in ec2_types.FEW}
        everything = [
            made
            for name, price in sorted(prices.items())
            for made in (
                product(name, region, price),
                product(name, region, price * 2, operatingSystem="Windows"),
                product(name, region, price * 1.1, tenancy="Dedicated"),
                product(name, region, 0.0, capacitystatus="AllocatedCapacityReservation"),
            )
        ]
        found = [each for each in everything if _fits(each, wanted)]
        first = int(asked.get("NextToken", "0"))
        end = first + min(self.page, asked["MaxResults"])
        more = {"NextToken": str(end)} if end < len(found) else {}
        return {"FormatVersion": "aws_v1", "PriceList": found[first:end], **more}


def _headers(request: Any) -> list[tuple[bytes, list[bytes]]]:
    return list(request.requestHeaders.getAllRawHeaders())


def _fits(made: str, wanted: dict[str, str]) -> bool:
    has = json.loads(made)["product"]["attributes"]
    return all(has.get(field) == value for field, value in wanted.items())
