# SPDX-License-Identifier: Apache-2.0
"""Ids of sandboxes, containers and VMs, and the idempotency tokens of requests for VMs."""

from __future__ import annotations

import secrets


def new_id() -> str:
    """Return a new id or token: 32 hex digits."""
    return secrets.token_hex(16)
