# SPDX-License-Identifier: Apache-2.0
"""VMs that are elsewhere join the pods' network: addresses of the node's own pods, and tunnels to it."""
