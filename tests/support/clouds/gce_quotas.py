# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's quotas of requests a minute: one for each group of methods, of a project and region.

Source: Compute Engine, "Rate quotas": each group has 1,500 requests a minute by default, and what is left
starts anew with each minute, whenever the calls were made. Refusals say nothing of how long to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

PER_MINUTE = 1500
_SECONDS = 60.0
GROUPS = {
    "MutationRequests": "Queries per minute per region",
    "ListRequests": "List requests per minute per region",
    "OperationReadRequests": "Operation read requests per minute per region",
    "ReadRequests": "Read requests per minute per region",
}


class GceQuotas:
    """The quotas of one project and region, which all of its nodes use up.

    :param now: seconds. :param most: requests of a group in `seconds`. :ivar refused: how many, by group."""

    def __init__(self, now: Callable[[], float], most: int = PER_MINUTE, seconds: float = _SECONDS) -> None:
        self._now = now
        self._most = most
        self._seconds = seconds
        self._interval = -1
        self._used: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def refusal(self, parameters: Mapping[str, str]) -> str:
        """Count a request, by its `Action` in the simulator. Returns why it is refused; "": it is not."""
        interval = int(self._now() // self._seconds)
        if interval != self._interval:
            self._interval, self._used = interval, Counter()
        group = group_of(parameters["Action"])
        if self._used[group] >= self._most:
            self.refused[group] += 1
            return (
                f"Quota exceeded for quota metric '{group}' and limit '{GROUPS[group]}' of service "
                "'compute.googleapis.com' for consumer 'project_number:123456789012'."
            )
        self._used[group] += 1
        return ""


def group_of(action: str) -> str:
    """Return the group of methods that a request counts in."""
    if action == "operation":
        return "OperationReadRequests"
    if action.startswith("list "):
        return "ListRequests"
    return "ReadRequests" if action.startswith("get ") else "MutationRequests"
