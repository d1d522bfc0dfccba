# SPDX-License-Identifier: Apache-2.0
"""Keeping VMs as they run: their memory, devices and disk."""
