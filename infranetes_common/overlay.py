# SPDX-License-Identifier: Apache-2.0
"""The parameters of the tunnel between a VM and its node that both ends share."""

from __future__ import annotations

VNI = 2475  # the tunnels' VXLAN network identifier
NODE_MAC = "02:69:6e:66:76:78"  # the node's end. 02: locally administered; then "infvx"
OVERHEAD = 50  # bytes that a tunnel adds to a packet: Ethernet, VXLAN, UDP, IPv4
