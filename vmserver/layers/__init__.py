# SPDX-License-Identifier: Apache-2.0
"""The layers of images in this VM: shown by the hypervisor as disks, or brought by the node."""
