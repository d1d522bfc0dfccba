# SPDX-License-Identifier: Apache-2.0
"""The VMs of this node in a cloud: their launch, what is known of them, and that none is left behind."""
