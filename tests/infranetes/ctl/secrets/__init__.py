# SPDX-License-Identifier: Apache-2.0
"""The secrets of a node, found and left out."""
