# SPDX-License-Identifier: Apache-2.0
"""The node's own runtime (containerd, CRI-O) behind the same socket: each call is routed to its owner, and
lists are joined."""
