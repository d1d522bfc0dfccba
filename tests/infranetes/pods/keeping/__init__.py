# SPDX-License-Identifier: Apache-2.0
"""Pods that are kept."""
