# SPDX-License-Identifier: Apache-2.0
"""The pod's firewall in its own VM, for VMs whose packets nobody else can judge.

message    what the node says  →  a PodFirewall, checked
firewall   the PodFirewall  →  the kernel's table, and kept there
"""
