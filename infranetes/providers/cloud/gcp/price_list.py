# SPDX-License-Identifier: Apache-2.0
"""Google's price list, the Cloud Billing Catalog API, which libcloud has no call for; its connection sends.

It has no prices of machine types but of their cores and memory, for each family, region and way to pay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import attrs
from libcloud.common.base import Connection

from infranetes.providers.cloud.calls.connections import close_sockets, connection_arguments
from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer
from infranetes.providers.cloud.offers.price_page import PricePage

SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"
_HOST = "cloudbilling.googleapis.com"
_COMPUTE_ENGINE = "/v1/services/6F81-5844-456A/skus"  # the id is that of the service
_MAX_PAGES = 200
_PAGE = 2000  # SKUs in one page, of 5,000 at most, so that reading it does not hold up other threads for long
_FAMILY = re.compile(r"([A-Z][0-9][A-Z]?) (?:AMD |Arm |Predefined )?Instance (Core|Ram) running in .+")
_COMPUTE_OPTIMIZED = re.compile(r"Compute optimized (Core|Ram) running in .+")
# Machine types that have a price of their own.
_WHOLE = {"Micro Instance with burstable CPU": "f1-micro", "Small Instance with 1 VCPU": "g1-small"}
_UNITS = {"Core": "h", "Ram": "GiBy.h"}


class AccessToken(Protocol):
    """Gives the current token for the API."""

    @property
    def access_token(self) -> str: ...


@attrs.frozen
class Rates:
    """A region's prices of an hour, on demand.

    :ivar parts: of a core, or a GiB of memory, by family and `Core` or `Ram`. :ivar whole: of machine types.
    """

    parts: Mapping[tuple[str, str], float]
    whole: Mapping[str, float]

    def of(self, offer: Offer) -> float | None:
        """Return the price of an hour of a machine type; None: it has more than cores and memory, or one of
        them has no price."""
        if offer.name in self.whole:
            return self.whole[offer.name]
        family = offer.name.partition("-")[0]
        core, ram = self.parts.get((family, "Core")), self.parts.get((family, "Ram"))
        if offer.gpus or "lssd" in offer.name or core is None or ram is None:
            return None
        return offer.cpu_millis / 1000 * core + offer.memory_bytes / (1 << 30) * ram


class _Answer(Protocol):
    object: object


class _Response(PricePage):
    most_bytes = 16 << 20

    def parse_error(self) -> str:
        return f"the price list answers {self.status}: {str(self.body)[:200]}"


class _Connection(Connection):  # type: ignore[misc]
    host = _HOST
    responseCls = _Response


class PriceList:
    """A connection to the API, for one thread. :param endpoint: the one to use in place of Google's own; "":
    Google's own."""

    def __init__(self, token: AccessToken, timeout: float, endpoint: str) -> None:
        self._token = token
        self._connection = _Connection(timeout=timeout, **connection_arguments(endpoint))

    def close(self) -> None:
        """Close the sockets."""
        close_sockets(self._connection)

    def _thd_rates(self, region: str) -> Rates:
        """Return a region's prices."""
        parts: dict[tuple[str, str], float] = {}
        whole: dict[str, float] = {}
        for sku in self._skus():
            found = rate_of(sku, region)
            if found is None:
                continue
            name, part, price = found
            if part:
                parts.setdefault((name, part), price)
            else:
                whole.setdefault(name, price)
        return Rates(parts, whole)

    def _skus(self) -> Iterator[object]:
        token = ""
        for _ in range(_MAX_PAGES):
            answer: _Answer = self._connection.request(
                _COMPUTE_ENGINE,
                params={"pageSize": _PAGE, **({"pageToken": token} if token else {})},
                headers={"Authorization": f"Bearer {self._token.access_token}"},
                retry_failed=False,
            )
            page = answer.object
            if not isinstance(page, dict) or not isinstance(page.get("skus"), list):
                raise CloudError(ErrorKind.INVALID, "the price list's answer has no skus")
            yield from page["skus"]
            token = str(page.get("nextPageToken") or "")
            if not token:
                return
        raise CloudError(ErrorKind.INVALID, "the price list does not end")


def rate_of(sku: object, region: str) -> tuple[str, str, float] | None:
    """Return the family or machine type that a SKU is for, the part of it (`""`: all of it), and the price of
    an hour. None: the SKU is for something else, or for another region.

    :param sku: JSON, as the API has it."""
    try:
        said: Any = sku  # Any: its form is checked below
        named = _named(str(said["description"]))
        category, [*regions] = said["category"], said["serviceRegions"]
        if named is None or region not in regions:
            return None
        if (category["resourceFamily"], category["usageType"]) != ("Compute", "OnDemand"):
            return None
        expression = said["pricingInfo"][-1]["pricingExpression"]
        price = expression["tieredRates"][-1]["unitPrice"]
        amount = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
        if price["currencyCode"] != "USD" or expression["usageUnit"] != _UNITS[named[1] or "Core"]:
            return None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return (*named, amount) if amount > 0 else None


def _named(description: str) -> tuple[str, str] | None:
    if (family := _FAMILY.fullmatch(description)) is not None:
        return family[1].lower(), family[2]
    if (optimized := _COMPUTE_OPTIMIZED.fullmatch(description)) is not None:
        return "c2", optimized[1]
    name = _WHOLE.get(description.partition(" running in ")[0])
    return (name, "") if name is not None else None
