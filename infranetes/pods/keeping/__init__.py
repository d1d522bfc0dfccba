# SPDX-License-Identifier: Apache-2.0
"""Pods whose VMs are kept as they run."""
