# SPDX-License-Identifier: Apache-2.0
"""A simulated VM in namespaces of its own: the same agent and the same containers as in a cloud's VM.

`hypervisor`
    A process for each VM, started by the farm. It turns the VM on and off, and ends with the farm.
`guest`
    The VM's first process: makes its file systems and its network, and keeps the agent running.
`network`
    The cable from the VM to the bridge that stands for the cloud's network.
`cgroups`
    The VM's cgroup, in which containers have theirs.

A VM shares the machine's kernel and clock, and sees the machine's files, which it can't change; its /etc and
/run are its own. Its namespaces end with its last process.

These modules need nothing but the standard library, so that a VM starts fast.
"""

from __future__ import annotations

AGENT_PORT = 2475  # as in `infranetes_common.identity`
"""The port that a VM's agent listens on."""
