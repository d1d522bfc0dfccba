# SPDX-License-Identifier: Apache-2.0
"""Ports of the node that lead to pods."""
