# SPDX-License-Identifier: Apache-2.0
"""Volumes: files and directories of the node, copied into this VM and kept equal on both sides."""
