# SPDX-License-Identifier: Apache-2.0
"""How the node and its VMs know each other: the node's CA, certificates, addresses of the node."""
