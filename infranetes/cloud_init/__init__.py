# SPDX-License-Identifier: Apache-2.0
"""What a guest is told of itself by CDs: NoCloud and ConfigDrive, for cloud-init and cloudbase-init.

==================  ==========================================================================
`document`          the values: `GuestDocument` and what it consists of
`configuration`     `configuration`, which makes a GuestConfiguration of a document
`user_data`         the pod's own documents: found, checked, and told apart
`multipart`         several documents as one, for cloud-init to merge
`cloud_config`      what Infranetes adds to the pod's
`boot_script`       the part of it that a shell runs at each boot
`windows`           the part of it that PowerShell runs
`network`           the network's configuration, in both forms
==================  ==========================================================================

Nothing here does any input or output. The same document makes the same bytes.
"""
