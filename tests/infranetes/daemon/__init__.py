# SPDX-License-Identifier: Apache-2.0
"""The node daemon as a process of its own, over real sockets, with simulated VMs that run real agents."""
