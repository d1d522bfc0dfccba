# SPDX-License-Identifier: Apache-2.0
"""What the kernel of the node lets through to pods and to their agents: tables of nftables."""
