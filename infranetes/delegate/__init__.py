# SPDX-License-Identifier: Apache-2.0
"""The node's own runtime (containerd, CRI-O) behind the same socket: whose a call is, and what both say."""
