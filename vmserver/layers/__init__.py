# SPDX-License-Identifier: Apache-2.0
"""The image layers in this VM: the hypervisor attaches them as disks, or the node uploads them."""
