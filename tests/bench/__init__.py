# SPDX-License-Identifier: Apache-2.0
"""Tests of the benches: what they report, choose and read. That they measure is seen when they run."""
