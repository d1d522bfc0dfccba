# SPDX-License-Identifier: Apache-2.0
"""Volumes of this node: their files, their snapshots, and how VMs have them."""
