# SPDX-License-Identifier: Apache-2.0
"""Ids of sandboxes, containers and VMs, and the tokens by which VMs are asked for."""

from __future__ import annotations

import secrets


def new_id() -> str:
    """An id or token: 32 hex digits."""
    return secrets.token_hex(16)
