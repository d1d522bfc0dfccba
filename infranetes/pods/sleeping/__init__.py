# SPDX-License-Identifier: Apache-2.0
"""Pods that sleep: their VMs' memory is on the node's disk, and Kubernetes sees them running."""
