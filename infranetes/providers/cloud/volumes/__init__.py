# SPDX-License-Identifier: Apache-2.0
"""Disks of a cloud that outlive VMs, and their snapshots: what each cloud implements, and what all share."""
