# SPDX-License-Identifier: Apache-2.0
"""What the tests of RPCs share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: Stands in for a `txgrpc.Call` without a deadline.
NO_CALL: Any = SimpleNamespace(deadline=None, time_remaining=lambda: None)
