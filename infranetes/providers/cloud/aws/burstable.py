# SPDX-License-Identifier: Apache-2.0
"""Burstable instance types: the part of their vCPUs that lasts.

Such a type earns CPU credits, and a credit is one vCPU for a minute. What it earns in an hour is what it can
use for good; EC2 throttles it to that, or bills what is beyond, as its credit option says. No call of EC2's
tells these figures.
"""

from __future__ import annotations

import re

# CPU credits that each size earns in an hour (source: Amazon EC2 User Guide, "Key concepts for burstable
# performance instances", the table of CPU credits earned per hour).
_CREDITS = {
    "t2.nano": 3.0,
    "t2.micro": 6.0,
    "t2.small": 12.0,
    "t2.medium": 24.0,
    "t2.large": 36.0,
    "t2.xlarge": 54.0,
    "t2.2xlarge": 81.6,
    **{
        f"{family}.{size}": credits
        for family in ("t3", "t3a", "t4g")
        for size, credits in (
            ("nano", 6.0),
            ("micro", 12.0),
            ("small", 24.0),
            ("medium", 24.0),
            ("large", 36.0),
            ("xlarge", 96.0),
            ("2xlarge", 192.0),
        )
    },
}
_MINUTES = 60
_LEAST = 0.05  # vCPUs: the smallest baseline in the table, assumed for types that it lacks
_FAMILY = re.compile(r"t[0-9]+[a-z]*\.")


def is_burstable(name: str) -> bool:
    """Return whether a type is burstable, by its name: all are of a family T."""
    return _FAMILY.match(name) is not None


def lasting_millis(name: str, vcpus: int) -> int:
    """Return the thousandths of a vCPU that a burstable type can use for good."""
    credits = _CREDITS.get(name)
    return round(vcpus * _LEAST * 1000) if credits is None else round(credits * 1000 / _MINUTES)
