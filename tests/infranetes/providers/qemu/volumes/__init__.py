# SPDX-License-Identifier: Apache-2.0
"""Volumes of this node."""
