# SPDX-License-Identifier: Apache-2.0
"""VMs without our agent: reached by SSH, by QEMU's guest agent, or by their hypervisor alone."""
