# SPDX-License-Identifier: Apache-2.0
"""The overlay, which joins distant VMs to the pods' network: addresses of the node's subnet, and tunnels."""
