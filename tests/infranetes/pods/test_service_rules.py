# SPDX-License-Identifier: Apache-2.0
"""A pod's containers are started once its VM knows the addresses of Services."""

from __future__ import annotations
