# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: run, stopped and removed."""
