# SPDX-License-Identifier: Apache-2.0
"""The overlay, which joins VMs elsewhere to the pods' network: addresses of the node's subnet, and tunnels."""
