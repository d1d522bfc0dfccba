# SPDX-License-Identifier: Apache-2.0
"""The states of sandboxes and containers, and the transitions between them.

    Sandbox     what is true                                as the CRI shows it   goes to
    LAUNCHING   recorded; a VM is asked for, or is to be    not at all            READY ABANDONED
    ABANDONED   the launch failed, or nobody waits for it   not at all            (deleted)
    VACANT      recorded; no VM before a container names    READY                 BOOTING STOPPING
                the image, which is the VM's
    BOOTING     the image is recorded; a VM is asked for,   READY                 READY VACANT STOPPING
                or is to be, or is being ended again
    READY       its VM runs, its agent is configured        READY                 LOST STOPPING VACANT
    LOST        its VM ended by itself; what it held stays  NOTREADY              STOPPING
    STOPPING    containers, logs and the VM are ended       NOTREADY              STOPPED
    STOPPED     no VM, and nothing that one held            NOTREADY              (deleted)

    Container   what is true                                as the CRI shows it   goes to
    CREATING    recorded; the agent is asked, or is to be   not at all            CREATED (deleted)
    CREATED     there, never started                        CREATED               STARTING RUNNING EXITED
                                                                                  REMOVING
    STARTING    recorded; the agent is asked to run it, or  CREATED, then UNKNOWN RUNNING EXITED REMOVING
                is to be
    RUNNING     it was run: its process runs, or has ended  RUNNING               EXITED REMOVING
                and its output is on its way to the node
    EXITED      its process has ended, or its VM has        EXITED                REMOVING
    REMOVING    the agent is asked to forget it             EXITED                (deleted)

Sandboxes begin as LAUNCHING, or as VACANT where images are VMs. A VM is then that of one container: if the
container can't be created the VM is destroyed, and the sandbox is VACANT again, with another token. A daemon
that finds a BOOTING sandbox ends the boot that an earlier one began: kubelet asks for the container again.

A container is run once. STARTING is on the disk before the agent is asked, and RUNNING before the client is
answered, so after a daemon was killed in between, the next one knows what may have run. Clients see CREATED
while they wait for the answer to their StartContainer. If the agent's answer is lost nobody knows whether the
container runs: it is UNKNOWN until the agent reports it, and never CREATED again, since kubelet would then
run another one.

A container that ran only for a moment was RUNNING, too: it goes from CREATED or STARTING to EXITED through
RUNNING, unless it never ran (it could not, or its start was refused).

A container that its agent does not know, or whose VM is gone, can be deleted from any state, because no agent
has to forget it. So can a sandbox that has no VM, with its containers. A failed launch goes from LAUNCHING to
ABANDONED until its VM is destroyed, so that it has a record as long as anything is left of it.
"""

from __future__ import annotations

import enum


class SandboxState(enum.Enum):
    """The state of a sandbox; see the table above."""

    LAUNCHING = "launching"
    VACANT = "vacant"
    BOOTING = "booting"
    ABANDONED = "abandoned"
    READY = "ready"
    LOST = "lost"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ContainerState(enum.Enum):
    """The state of a container; see the table above."""

    CREATING = "creating"
    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    REMOVING = "removing"


SANDBOX_TRANSITIONS: dict[SandboxState, frozenset[SandboxState]] = {
    SandboxState.LAUNCHING: frozenset({SandboxState.READY, SandboxState.ABANDONED}),
    SandboxState.ABANDONED: frozenset(),
    SandboxState.VACANT: frozenset({SandboxState.BOOTING, SandboxState.STOPPING}),
    SandboxState.BOOTING: frozenset({SandboxState.READY, SandboxState.VACANT, SandboxState.STOPPING}),
    SandboxState.READY: frozenset({SandboxState.LOST, SandboxState.STOPPING, SandboxState.VACANT}),
    SandboxState.LOST: frozenset({SandboxState.STOPPING}),
    SandboxState.STOPPING: frozenset({SandboxState.STOPPED}),
    SandboxState.STOPPED: frozenset(),
}

CONTAINER_TRANSITIONS: dict[ContainerState, frozenset[ContainerState]] = {
    ContainerState.CREATING: frozenset({ContainerState.CREATED}),
    ContainerState.CREATED: frozenset(
        {
            ContainerState.STARTING,
            ContainerState.RUNNING,
            ContainerState.EXITED,
            ContainerState.REMOVING,
        }
    ),
    ContainerState.STARTING: frozenset(
        {ContainerState.RUNNING, ContainerState.EXITED, ContainerState.REMOVING}
    ),
    ContainerState.RUNNING: frozenset({ContainerState.EXITED, ContainerState.REMOVING}),
    ContainerState.EXITED: frozenset({ContainerState.REMOVING}),
    ContainerState.REMOVING: frozenset(),
}

SHOWN_SANDBOXES = frozenset(SandboxState) - {SandboxState.LAUNCHING, SandboxState.ABANDONED}
"""The states in which the CRI shows a sandbox at all. kubelet must not find one whose launch is under way: it
then asks for the same attempt again, and joins the launch."""

SHOWN_READY = frozenset({SandboxState.READY, SandboxState.VACANT, SandboxState.BOOTING})
"""The states that the CRI shows as READY."""

ALIVE = frozenset({ContainerState.CREATED, ContainerState.STARTING, ContainerState.RUNNING})
"""The states of containers that have not ended."""

WITH_VM = frozenset(SandboxState) - {SandboxState.STOPPED}
"""The states in which there may be a VM."""
