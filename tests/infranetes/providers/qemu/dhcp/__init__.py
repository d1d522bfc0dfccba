# SPDX-License-Identifier: Apache-2.0
"""DHCP on VMs' taps."""
