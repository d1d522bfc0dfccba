# SPDX-License-Identifier: Apache-2.0
"""The rates at which a public OpenStack serves one project: OpenStack itself limits nothing.

Source: OVHcloud, "Public Cloud API rate limits" (read in November 2026): Keystone serves a user 60 requests a
minute, and each other service a project 20 a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from tests.support.clouds.token_bucket import TokenBucket

_KEYSTONE, _OTHERS = 1.0, 20.0  # a second
_BURSTS = {"Keystone": 60.0}  # of the others, what they serve in a second


def limit_of(parameters: Mapping[str, str]) -> tuple[str, float]:
    """Return the limited service that a request is for, and how many requests a second it serves."""
    action, path = parameters["Action"], parameters.get("path", "")
    if action == "token":
        return "Keystone", _KEYSTONE
    if path.startswith("v2.0/"):
        return "Neutron", _OTHERS
    if path.startswith("v3/"):
        return "Cinder", _OTHERS
    return ("Glance" if "images" in action else "Nova"), _OTHERS


class OpenStackLimits:
    """The limits of one project. :param now: seconds. :ivar refused: how many requests were, by service."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._buckets: dict[str, TokenBucket] = {}
        self.refused: Counter[str] = Counter()

    def take(self, parameters: Mapping[str, str]) -> bool:
        """Count a request. Returns whether it is served."""
        service, rate = limit_of(parameters)
        bucket = self._buckets.setdefault(service, TokenBucket(_BURSTS.get(service, rate), rate, self._now()))
        if not bucket.has_one(self._now()):
            self.refused[service] += 1
            return False
        bucket.take()
        return True
