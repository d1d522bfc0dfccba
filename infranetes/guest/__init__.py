# SPDX-License-Identifier: Apache-2.0
"""The guest image, which QEMU VMs boot: Debian, the agent, and the programs that run containers."""
