# SPDX-License-Identifier: Apache-2.0
"""Images that are whole machines: from an image of the node to the disk that VMs boot copies of.

==============  ================================================================================
`disk`          the values: `BaseDisk`, `DiskFormat`
==============  ================================================================================
"""
