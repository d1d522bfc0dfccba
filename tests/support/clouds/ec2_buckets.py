# SPDX-License-Identifier: Apache-2.0
"""EC2's token buckets: one for each action of an account and region, whoever calls.

Source: Amazon EC2 Developer Guide, "Request throttling for the Amazon EC2 API", the tables of default sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.clouds.token_bucket import TokenBucket

_LOOKS = ("Describe", "Get", "List", "Search")
_UNFILTERED = {  # actions that have a smaller bucket for calls with neither a filter nor pages
    "DescribeInstances",
    "DescribeInstanceStatus",
    "DescribeNetworkInterfaces",
    "DescribeSecurityGroups",
    "DescribeSnapshots",
    "DescribeSpotInstanceRequests",
    "DescribeVolumes",
}
_UNCATEGORIZED = {
    "RunInstances": (5.0, 2.0),
    "TerminateInstances": (100.0, 5.0),
    "CreateVolume": (100.0, 5.0),
    "DeleteVolume": (100.0, 5.0),
    "CreateSnapshot": (100.0, 5.0),
    "DeleteSnapshot": (100.0, 5.0),
    "CreateTags": (100.0, 10.0),
}


class Ec2Buckets:
    """The buckets of one account and region.

    :param now: seconds. :ivar refused: how many calls were, by action.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._buckets: dict[str, TokenBucket] = {}
        self.refused: dict[str, int] = {}

    def take(self, form: Mapping[str, str]) -> bool:
        """Take a call's token. Returns whether there was one."""
        action = form["Action"]
        name, most, refill = bucket_of(form)
        bucket = self._buckets.setdefault(name, TokenBucket(most, refill, self._now()))
        if not bucket.has_one(self._now()):
            self.refused[action] = self.refused.get(action, 0) + 1
            return False
        bucket.take()
        return True


def bucket_of(form: Mapping[str, str]) -> tuple[str, float, float]:
    """Return the name, the size and the refill per second of a call's bucket."""
    action = form["Action"]
    if action in _UNCATEGORIZED:
        return (action, *_UNCATEGORIZED[action])
    if not action.startswith(_LOOKS):
        return action, 50.0, 5.0
    narrowed = any(name.startswith(("Filter.", "MaxResults", "NextToken")) for name in form)
    if action in _UNFILTERED and not narrowed:
        return f"{action} of all", 50.0, 10.0
    return action, 100.0, 20.0
