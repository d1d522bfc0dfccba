# SPDX-License-Identifier: Apache-2.0
"""Figures of Infranetes: how long its calls take and how much memory it needs. See docs/performance.md."""
