"""The states of sandboxes and containers, and the only ways from one to another.

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
    CREATED     there, never started                        CREATED               RUNNING EXITED REMOVING
    RUNNING     its process runs                            RUNNING               EXITED REMOVING
    EXITED      its process has ended, or its VM has        EXITED                REMOVING
    REMOVING    the agent is asked to forget it             EXITED                (deleted)

    Pool        what is true                                                      goes to
    BOOTING     recorded; a VM is asked for, or is to be                          IDLE ENDING
    IDLE        its VM runs, its agent answered once; it is nobody's              ENDING (a sandbox)
    ENDING      drained, of no size that is wanted, or found dead                 (deleted)

A pool's VM is claimed by one write that deletes its record and makes a LAUNCHING sandbox's with the same
id, token and VM: there is no moment in which a restart finds it in both or in neither, and none in which
its tags have to change. A write that finds no IDLE record of that id fails, so it is claimed once.

Sandboxes begin as LAUNCHING, or as VACANT where images are VMs. Then the VM is that of one container: when
the container can't be made the VM is destroyed, and the sandbox is VACANT again, with another token. A
daemon that finds one BOOTING ends what an earlier one began: kubelet asks for the container again.

A container that its agent does not know, or whose VM is gone, needs nobody to forget it: its record is
deleted from any state. So is a sandbox's once it has no VM, with the records of its containers. A launch
that fails leaves LAUNCHING for ABANDONED, which ends when its VM is destroyed: also a failed launch has
a record until nothing of it is left.
"""

from __future__ import annotations

import enum
from typing import TypeVar


class IllegalTransition(Exception):
    """A fault of this program: a state was to follow another that it can't follow."""


class SandboxState(enum.Enum):
    """Where a sandbox is; see the table above."""

    LAUNCHING = "launching"
    VACANT = "vacant"
    BOOTING = "booting"
    ABANDONED = "abandoned"
    READY = "ready"
    LOST = "lost"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ContainerState(enum.Enum):
    """Where a container is; see the table above."""

    CREATING = "creating"
    CREATED = "created"
    RUNNING = "running"
    EXITED = "exited"
    REMOVING = "removing"


class PoolState(enum.Enum):
    """Where a VM of the pool is; see the table above."""

    BOOTING = "booting"
    IDLE = "idle"
    ENDING = "ending"


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
        {ContainerState.RUNNING, ContainerState.EXITED, ContainerState.REMOVING}
    ),
    ContainerState.RUNNING: frozenset({ContainerState.EXITED, ContainerState.REMOVING}),
    ContainerState.EXITED: frozenset({ContainerState.REMOVING}),
    ContainerState.REMOVING: frozenset(),
}

POOL_TRANSITIONS: dict[PoolState, frozenset[PoolState]] = {
    PoolState.BOOTING: frozenset({PoolState.IDLE, PoolState.ENDING}),
    PoolState.IDLE: frozenset({PoolState.ENDING}),
    PoolState.ENDING: frozenset(),
}

SHOWN_SANDBOXES = frozenset(SandboxState) - {SandboxState.LAUNCHING, SandboxState.ABANDONED}
"""States in which the CRI shows a sandbox at all. kubelet has to find nothing where a launch is still
going on: it then asks for the same attempt again, which joins that launch."""

SHOWN_READY = frozenset({SandboxState.READY, SandboxState.VACANT, SandboxState.BOOTING})
"""States that the CRI shows as READY."""

WITH_VM = frozenset(SandboxState) - {SandboxState.STOPPED}
"""States in which there may be a VM."""

_State = TypeVar("_State", SandboxState, ContainerState, PoolState)


def may_follow(before: _State, after: _State) -> bool:
    """Whether `after` can come next. A state never follows itself."""
    if isinstance(before, SandboxState):
        return after in SANDBOX_TRANSITIONS[before]
    if isinstance(before, PoolState):
        return after in POOL_TRANSITIONS[before]
    return after in CONTAINER_TRANSITIONS[before]


def follow(before: _State, after: _State) -> _State:
    """`after`, where it may follow `before`.

    :raise IllegalTransition: it may not.
    """
    if not may_follow(before, after):
        raise IllegalTransition(f"{type(before).__name__} {before.value} can't become {after.value}")
    return after
