# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of Infranetes: how long its calls take and how much memory it needs. See docs/performance.md."""
