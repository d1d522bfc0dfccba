# SPDX-License-Identifier: Apache-2.0
"""Images that are loaded into VMs and removed from them."""
