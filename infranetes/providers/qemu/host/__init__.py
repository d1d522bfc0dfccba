# SPDX-License-Identifier: Apache-2.0
"""What the node gives to VMs besides its networks and files: users, and KVM."""
