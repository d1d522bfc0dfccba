# SPDX-License-Identifier: Apache-2.0
"""What the tests of RPCs share."""

from __future__ import annotations

from typing import Any

#: Stands in for a `txgrpc.Call`, for RPCs that don't look at theirs.
NO_CALL: Any = None
