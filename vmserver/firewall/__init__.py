# SPDX-License-Identifier: Apache-2.0
"""The pod's firewall inside its own VM, for VMs whose packets nothing outside can filter.

message    the node's message  →  a validated PodFirewall
firewall   the PodFirewall  →  the kernel's table, which it keeps in place
"""
