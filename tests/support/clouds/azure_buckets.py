# SPDX-License-Identifier: Apache-2.0
"""Azure's token buckets, of Resource Manager and then of the resource provider.

Sources: Azure Resource Manager, "Understand how Azure Resource Manager throttles requests": for each
subscription, region and service principal, and 15 times as much for all principals; Virtual Machines,
"Compute throttling limits": for each subscription and region, and for each VM, refilled every minute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from tests.support.clouds.token_bucket import TokenBucket

_MINUTE = 60.0
_ALL_PRINCIPALS = 15
# Resource Manager's buckets: the size, and the tokens that are added per second.
_ARM = {"reads": (250, 25), "writes": (200, 10), "deletes": (200, 10)}
# Compute's buckets: the tokens added per minute, a third of the size, for the subscription and for one VM.
_COMPUTE = {
    "PutVM": (500, 4),
    "DeleteVM": (500, 4),
    "LowCostGet": (8000, 12),
    "HighCostGet": (300, 0),
    "GetOperation": (5000, 15),
}
_OF_ACTIONS = {
    "launch": "PutVM",
    "destroy": "DeleteVM",
    "get virtualMachines": "LowCostGet",
    "list VMs": "HighCostGet",
    "list states": "HighCostGet",
    "operation": "GetOperation",
}


@attrs.frozen
class Throttled:
    """A refusal. :ivar seconds: how long to wait. :ivar headers: those with the remaining tokens."""

    code: str
    message: str
    seconds: int
    headers: tuple[tuple[str, str], ...]


class AzureBuckets:
    """The buckets of one subscription and region.

    :param now: seconds. :param scale: how much larger than by default Resource Manager's buckets are.
    :ivar refused: how many requests were, by bucket."""

    def __init__(self, now: Callable[[], float], scale: float = 1.0) -> None:
        self._now = now
        self._scale = scale
        self._buckets: dict[str, TokenBucket] = {}
        self.refused: Counter[str] = Counter()

    def take(self, parameters: Mapping[str, str], principal: str = "") -> Throttled | None:
        """Count a request, by its `Action` in the simulator, unless one of its buckets is empty."""
        action = parameters["Action"]
        kind = _kind(action)
        most, refill = (each * self._scale for each in _ARM[kind])
        arm = [
            self._bucket(f"{kind} of {principal}", most, refill),
            self._bucket(f"{kind} of all", most * _ALL_PRINCIPALS, refill * _ALL_PRINCIPALS),
        ]
        left = (f"x-ms-ratelimit-remaining-subscription-{kind}", f"{int(arm[0].tokens)}")
        seconds = max(bucket.wait(self._now()) for bucket in arm)
        if seconds:
            self.refused[kind] += 1
            words = f"Number of '{kind.removesuffix('s')}' requests for subscription exceeded the limit."
            return Throttled("SubscriptionRequestsThrottled", words, math.ceil(seconds), (left,))
        compute = self._of_compute(action, parameters.get("name", ""))
        seconds = max((bucket.wait(self._now()) for bucket in compute), default=0.0)
        if seconds:
            operation = _OF_ACTIONS[action]
            self.refused[operation] += 1
            words = "The server rejected the request because too many requests have been received."
            remaining = ("x-ms-ratelimit-remaining-resource", f"Microsoft.Compute/{operation};0")
            return Throttled("OperationNotAllowed", words, math.ceil(seconds), (left, remaining))
        for bucket in (*arm, *compute):
            bucket.take()
        return None

    def _of_compute(self, action: str, name: str) -> list[TokenBucket]:
        operation = _OF_ACTIONS.get(action)
        if operation is None:
            return []
        everything, one = _COMPUTE[operation]
        buckets = [self._by_minute(operation, everything)]
        if one and name:
            buckets.append(self._by_minute(f"{operation} of {name}", one))
        return buckets

    def _by_minute(self, name: str, refill: float) -> TokenBucket:
        return self._bucket(name, refill * 3, refill / _MINUTE, _MINUTE)

    def _bucket(self, name: str, most: float, refill: float, step: float = 0.0) -> TokenBucket:
        if name not in self._buckets:
            self._buckets[name] = TokenBucket(most, refill, self._now(), step)
        return self._buckets[name]


def refills_of(action: str) -> dict[str, float]:
    """Return how many tokens per second the buckets get that a request takes one from, of one principal and
    of the subscription."""
    refills = {f"Resource Manager's {_kind(action)}": float(_ARM[_kind(action)][1])}
    if (operation := _OF_ACTIONS.get(action)) is not None:
        refills[f"Compute's {operation}"] = _COMPUTE[operation][0] / _MINUTE
    return refills


def _kind(action: str) -> str:
    return "deletes" if _is_end(action) else "reads" if _is_look(action) else "writes"


def _is_look(action: str) -> bool:
    return action.startswith(("get ", "list ")) or action == "operation"


def _is_end(action: str) -> bool:
    return action == "destroy" or action.startswith("delete ")
