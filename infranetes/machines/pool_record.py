# SPDX-License-Identifier: Apache-2.0
"""The record of a VM of the pool, and its states.

    State       what is true                                                      goes to
    BOOTING     recorded; a VM is asked for, or will be                           IDLE ENDING
    IDLE        its VM is up and belongs to no pod                                ENDING (a sandbox)
    PREPARING   as BOOTING, for a VM that is to be stopped                        STOPPING ENDING
    STOPPING    its agent has answered, and nobody needs it any more; the         STOPPED ENDING
                provider is asked to stop the VM, or will be
    STOPPED     the provider has stopped its VM, which belongs to no pod          ENDING (a sandbox)
    ENDING      drained, of a size no longer wanted, or found dead                (deleted)

A VM of the pool is claimed by one write that deletes its record and makes a LAUNCHING sandbox's record with
the same id, token and VM. So a restart always finds the VM in exactly one of the two, and its tags never
change. The write fails if it finds no IDLE or STOPPED record of that id, so a VM is claimed only
once.

A stopped VM's record has neither an address nor a certificate, and the sandbox that claims it takes on only
id and token: it is asked for as a new VM is, and the provider, which knows the token, starts what it has
stopped, or makes another (`providers.stopping`).
"""

from __future__ import annotations

import enum

import attrs

from infranetes_common.transitions import follow


class PoolState(enum.Enum):
    """The state of a VM of the pool; see the table above."""

    BOOTING = "booting"
    IDLE = "idle"
    PREPARING = "preparing"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ENDING = "ending"


TRANSITIONS: dict[PoolState, frozenset[PoolState]] = {
    PoolState.BOOTING: frozenset({PoolState.IDLE, PoolState.ENDING}),
    PoolState.IDLE: frozenset({PoolState.ENDING}),
    PoolState.PREPARING: frozenset({PoolState.STOPPING, PoolState.ENDING}),
    PoolState.STOPPING: frozenset({PoolState.STOPPED, PoolState.ENDING}),
    PoolState.STOPPED: frozenset({PoolState.ENDING}),
    PoolState.ENDING: frozenset(),
}
BOOTS = (PoolState.BOOTING, PoolState.PREPARING)
TO_STOP = (PoolState.PREPARING, PoolState.STOPPING, PoolState.STOPPED)
"""The states of a VM on its way into the stopped part of the pool, and of one that waits there."""


@attrs.frozen
class PoolRecord:
    """One VM of the pool. The sandbox that claims it takes on its id, so that nothing has to be renamed."""

    id: str  # 32 hex digits
    token: str  # the VM's idempotency key, 32 hex digits
    state: PoolState
    provider: str  # as in SandboxRecord
    handler: str  # the handler whose pods may get the VM; "": pods of any that have no pool of their own
    cpu_millis: int  # the size that the VM was made for, as `interface.Size`
    memory_bytes: int
    created_at: int
    instance_id: str = ""  # the provider's id of the VM; "" until it has answered
    address: str = ""
    agent_host: str = ""
    agent_port: int = 0
    certificate_until: int = 0  # as in SandboxRecord
    certificate_key: str = ""
    message: str = ""  # why it is ENDING, as a message

    def to(self, state: PoolState, message: str = "") -> PoolRecord:
        """Return this record in its next state. :raise IllegalTransition: the state can't follow its own."""
        return attrs.evolve(self, state=follow(TRANSITIONS, self.state, state), message=message)

    def stopped(self) -> PoolRecord:
        """Return this record of a VM that is STOPPING, once it is stopped."""
        return attrs.evolve(
            self.to(PoolState.STOPPED),
            address="",
            agent_host="",
            agent_port=0,
            certificate_until=0,
            certificate_key="",
        )
