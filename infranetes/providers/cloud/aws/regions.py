# SPDX-License-Identifier: Apache-2.0
"""AWS' regions and partitions: where a region's services are.

libcloud refuses regions that are newer than its release. botocore's partition data tells the host of any
region that fits a partition's pattern; what is newer than those as well is named by the rule that all public
partitions follow.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

import attrs

_REGION = re.compile(r"[a-z]{2,5}(-[a-z]+)+-[0-9]{1,2}")
_SUFFIXES = {"aws": "amazonaws.com", "aws-us-gov": "amazonaws.com", "aws-cn": "amazonaws.com.cn"}
# The regions that serve a partition's Price List Query API (source: AWS Billing User Guide, "Using AWS Price
# List API", the service's endpoints). Other partitions have none.
_PRICE_LISTS = {"aws": ("us-east-1", "eu-central-1", "ap-south-1"), "aws-cn": ("cn-northwest-1",)}
_NEAREST = {"eu": "eu-central-1", "me": "eu-central-1", "af": "eu-central-1", "il": "eu-central-1"}


@attrs.frozen
class Endpoint:
    """The endpoint of a service. :ivar region: the region in the credential scope of signed requests."""

    host: str
    region: str


class _Resolver(Protocol):
    """The part of botocore's resolver that is used here, typed because botocore has no types."""

    def construct_endpoint(self, service_name: str, region_name: str) -> dict[str, str] | None: ...


def is_region(name: str) -> bool:
    """Return whether a text could be a region's name."""
    return _REGION.fullmatch(name) is not None


def ec2(region: str) -> Endpoint:
    """Return the endpoint of a region's EC2."""
    return Endpoint(_host("ec2", region), region)


def price_list(region: str) -> Endpoint | None:
    """Return the endpoint of a region's price list; None: its partition has none."""
    found = _PRICE_LISTS.get(partition(region))
    if found is None:
        return None
    near = _NEAREST.get(region.partition("-")[0], found[0])
    where = near if near in found else found[0]
    return Endpoint(_host("api.pricing", where), where)


def currency(region: str) -> str:
    """Return the currency of a region's prices."""
    return "CNY" if partition(region) == "aws-cn" else "USD"


def partition(region: str) -> str:
    """Return the partition that a region is in."""
    found = _botocore(region, "ec2")
    if found is not None:
        return found["partition"]
    return "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"


def _host(service: str, region: str) -> str:
    found = _botocore(region, service)
    return found["hostname"] if found is not None else f"{service}.{region}.{_SUFFIXES[partition(region)]}"


@lru_cache
def _botocore(region: str, service: str) -> dict[str, str] | None:
    """Return botocore's endpoint of a service in a region; None: it knows none, or is not installed."""
    resolver = _resolver()
    return resolver.construct_endpoint(service, region) if resolver is not None else None


@lru_cache
def _resolver() -> _Resolver | None:
    try:
        from botocore.loaders import Loader
        from botocore.regions import EndpointResolver
    except ImportError:
        return None
    resolver: _Resolver = EndpointResolver(Loader().load_data("endpoints"))
    return resolver
