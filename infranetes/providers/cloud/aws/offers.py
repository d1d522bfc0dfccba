# SPDX-License-Identifier: Apache-2.0
"""AWS' own data on instance types: from EC2 their properties and zones, from the price list their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infranetes.providers.cloud.aws import bundled, regions
from infranetes.providers.cloud.aws.burstable import lasting_millis
from infranetes.providers.cloud.aws.driver import Driver, items, text
from infranetes.providers.cloud.aws.libcloud_types import Element
from infranetes.providers.cloud.aws.price_list import PriceList
from infranetes.providers.cloud.aws.quotas import quota_of
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer
from infranetes.providers.cloud.offers.book import MAX_OFFERS, Sources
from infranetes.providers.confidential import Confidential

_PAGE = "100"  # how many types EC2 describes at most in one page
_OFFERINGS_PAGE = "1000"
_ARCHITECTURES = ("x86_64", "arm64")  # in order of preference, for types with several
_PRICE_SECONDS = 10.0  # the timeout of one page of the price list


def sources(region: str) -> Sources:
    """Return the sources of a region's types and prices."""
    return Sources(f"aws {region}", "EC2", "AWS' price list", bundled.NAME, regions.currency(region))


class AwsOffers:
    """See `OfferSource`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.sources = sources(settings.region)

    def _thd_types(self, driver: Driver) -> Sequence[Offer]:
        zones = _zones(driver)
        found: list[Offer] = []
        for page in driver.pages("DescribeInstanceTypes", MaxResults=_PAGE):
            for each in items(page, "instanceTypeSet/item"):
                offer = offer_of(each, zones)
                if offer is not None and len(found) < MAX_OFFERS:
                    found.append(offer)
        return found

    def _thd_prices(self, driver: Driver, offers: Sequence[Offer]) -> Mapping[str, float]:
        region = self._settings.region
        where = regions.price_list(region)
        if where is None:
            raise CloudError(
                ErrorKind.INVALID, f"AWS publishes no prices for {region}; see prices_file in providers.aws"
            )
        timeout = min(_PRICE_SECONDS, self._settings.call_seconds)
        prices = PriceList(where, driver.keys, timeout, self._settings.price_endpoint)
        try:
            return prices._thd_on_demand(region, self.sources.currency)
        finally:
            prices.close()

    def _thd_bundled(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        return bundled.offers(self._settings.region)


def _zones(driver: Driver) -> dict[str, list[str]]:
    """Return the availability zones that offer types, by their names."""
    found: dict[str, list[str]] = {}
    asked = {"LocationType": "availability-zone", "MaxResults": _OFFERINGS_PAGE}
    for page in driver.pages("DescribeInstanceTypeOfferings", **asked):
        for each in items(page, "instanceTypeOfferingSet/item"):
            if len(found) < MAX_OFFERS:
                found.setdefault(text(each, "instanceType"), []).append(text(each, "location"))
    return found


def offer_of(described: Element, zones: Mapping[str, Sequence[str]]) -> Offer | None:
    """Return an instance type as an offer; None: it can't be had, or boots no image of ours.

    :param zones: that offer types; a type that none offers can't be had."""
    name = text(described, "instanceType")
    usages = {usage.text for usage in items(described, "supportedUsageClasses/item")}
    kinds = {kind.text for kind in items(described, "supportedVirtualizationTypes/item")}
    offered = items(described, "processorInfo/supportedArchitectures/item")
    has = {architecture.text for architecture in offered}
    architecture = next((each for each in _ARCHITECTURES if each in has), None)
    if name not in zones or "on-demand" not in usages or "hvm" not in kinds or architecture is None:
        return None
    try:
        vcpus = int(text(described, "vCpuInfo/defaultVCpus"))
        mib = int(text(described, "memoryInfo/sizeInMiB"))
        gpus = sum(int(text(gpu, "count") or 0) for gpu in items(described, "gpuInfo/gpus/item"))
    except ValueError:
        return None
    features = {feature.text for feature in items(described, "processorInfo/supportedFeatures/item")}
    burstable = text(described, "burstablePerformanceSupported") == "true"
    return Offer(
        name=name,
        cpu_millis=lasting_millis(name, vcpus) if burstable else vcpus * 1000,
        shared_cpus=vcpus if burstable else 0,
        memory_bytes=mib << 20,
        gpus=gpus,
        architecture=architecture,
        zones=tuple(sorted(zones[name])),
        quota=quota_of(name),
        confidential=(Confidential.SEV_SNP,) if "amd-sev-snp" in features else (),
    )
