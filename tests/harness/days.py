# SPDX-License-Identifier: Apache-2.0
"""The day's number, which selects those of the tests that take turns."""

from __future__ import annotations

import os
import time

VARIABLE = "CI_DAY"


def today() -> int:
    """Return the number of days since 1970, in UTC; the environment variable CI_DAY overrides it."""
    return int(os.environ.get(VARIABLE, "") or time.time() // 86400)
