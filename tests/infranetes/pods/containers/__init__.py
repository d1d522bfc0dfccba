# SPDX-License-Identifier: Apache-2.0
"""Containers: created, started, stopped and removed."""
