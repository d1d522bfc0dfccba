# SPDX-License-Identifier: Apache-2.0
"""Whether what fails is kept as it is, until somebody has looked."""

from __future__ import annotations

import os

VARIABLE = "KEEP"


def keeping() -> bool:
    """Return whether failed tests, or a failed demo, are to be kept."""
    return bool(os.environ.get(VARIABLE))
