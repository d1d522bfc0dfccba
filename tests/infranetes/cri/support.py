# SPDX-License-Identifier: Apache-2.0
"""What tests of RPCs share."""

from __future__ import annotations

from typing import Any

#: In the place of a `txgrpc.Call`, for RPCs that don't look at theirs.
NO_CALL: Any = None
