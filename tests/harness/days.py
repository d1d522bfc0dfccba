# SPDX-License-Identifier: Apache-2.0
"""The day by which tests that take turns are chosen."""

from __future__ import annotations

import os
import time

VARIABLE = "CI_DAY"


def today() -> int:
    """Return the number of days since 1970, by UTC; the environment's CI_DAY stands for another day."""
    return int(os.environ.get(VARIABLE, "") or time.time() // 86400)
