# SPDX-License-Identifier: Apache-2.0
"""The guest's part in keeping a VM and in cloning it: hold still, leave the old pod, become another one."""
