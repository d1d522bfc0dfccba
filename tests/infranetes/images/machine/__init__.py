# SPDX-License-Identifier: Apache-2.0
"""From images to the disks that VMs boot copies of."""
