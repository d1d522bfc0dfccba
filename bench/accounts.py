# SPDX-License-Identifier: Apache-2.0
"""What a cloud's account serves to all of its nodes together, by the vendors' documents.

The sources of the limits, and when they were read, are with the simulators that enforce them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from tests.support.clouds.azure_buckets import AzureBuckets, refills_of
from tests.support.clouds.ec2_buckets import Ec2Buckets, bucket_of
from tests.support.clouds.gce_quotas import PER_MINUTE, GceQuotas, group_of
from tests.support.clouds.openstack_limits import OpenStackLimits, limit_of

HOUR = 3600.0
# vCenter limits no requests. Source: Broadcom, article 375546, "vAPI and SOAP Session maxSessionCount:
# Modification in vCenter Server 8.0 U3" (read in November 2026).
VCENTER_SESSIONS = 3000

Parameters = Mapping[str, str]


@attrs.frozen
class Request:
    """A request to a cloud. :ivar at: seconds."""

    at: float
    parameters: Parameters


@attrs.frozen
class Use:
    """How much of one quota is used. :ivar quota: its name. :ivar calls: that count, of `most` in an hour."""

    quota: str
    calls: float
    most: float

    @property
    def percent(self) -> float:
        return 100.0 * self.calls / self.most


def uses(cloud: str, requests: Sequence[Request], hours: float, nodes: int) -> list[Use]:
    """Return what nodes use of each quota in an hour, the most used one first.

    :param requests: of one node. :param hours: in which it made them."""
    calls: dict[str, int] = {}
    most: dict[str, float] = {}
    for request in requests:
        for quota, per_second in _refills(cloud, request.parameters).items():
            calls[quota] = calls.get(quota, 0) + 1
            most[quota] = per_second * HOUR
    found = [Use(quota, count * nodes / hours, most[quota]) for quota, count in calls.items()]
    return sorted(found, key=lambda use: use.percent, reverse=True)


def _refills(cloud: str, parameters: Parameters) -> Mapping[str, float]:
    """Return the quotas that a request counts in, and how many requests a second each serves."""
    if cloud == "aws":
        name, _, refill = bucket_of(parameters)
        return {name: refill}
    if cloud == "azure":
        return {} if parameters["Action"] == "token" else refills_of(parameters["Action"])
    if cloud == "gcp":
        return {} if parameters["Action"] == "token" else {group_of(parameters["Action"]): PER_MINUTE / 60}
    if cloud == "openstack":
        return dict([limit_of(parameters)])
    return {}


def replay(cloud: str, traces: Sequence[Sequence[Request]]) -> int:
    """Return how many of all nodes' requests the account refuses. Refused ones are not made again."""
    requests = sorted((one for trace in traces for one in trace), key=lambda request: request.at)
    clock = _Clock()
    serves = _account(cloud, clock)
    refused = 0
    for request in requests:
        clock.now = request.at
        refused += not serves(request.parameters)
    return refused


@attrs.define
class _Clock:
    now: float = 0.0

    def seconds(self) -> float:
        return self.now


def _account(cloud: str, clock: _Clock) -> Callable[[Parameters], bool]:
    """Return what serves the requests of an account, whose buckets are full."""
    if cloud == "aws":
        return Ec2Buckets(clock.seconds).take
    if cloud == "azure":
        azure = AzureBuckets(clock.seconds)
        return lambda parameters: parameters["Action"] == "token" or azure.take(parameters) is None
    if cloud == "gcp":
        gcp = GceQuotas(clock.seconds)
        return lambda parameters: parameters["Action"] == "token" or not gcp.refusal(parameters)
    if cloud == "openstack":
        return OpenStackLimits(clock.seconds).take
    return lambda parameters: True
