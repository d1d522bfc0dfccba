# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a VM of the pool, and the states that it goes through.

    State       what is true                                                      goes to
    BOOTING     recorded; a VM is asked for, or is to be                          IDLE ENDING
    IDLE        its VM is up and belongs to no pod                                ENDING (a sandbox)
    ENDING      drained, of no size that is wanted, or found dead                 (deleted)

A VM of the pool is claimed by one write that deletes its record and makes a LAUNCHING sandbox's with the
same id, token and VM: there is no moment in which a restart finds it in both or in neither, and none in
which its tags have to change. A write that finds no IDLE record of that id fails, so it is claimed once.
"""

from __future__ import annotations

import enum

import attrs

from infranetes_common.transitions import follow


class PoolState(enum.Enum):
    """Where a VM of the pool is; see the table above."""

    BOOTING = "booting"
    IDLE = "idle"
    ENDING = "ending"


TRANSITIONS: dict[PoolState, frozenset[PoolState]] = {
    PoolState.BOOTING: frozenset({PoolState.IDLE, PoolState.ENDING}),
    PoolState.IDLE: frozenset({PoolState.ENDING}),
    PoolState.ENDING: frozenset(),
}


@attrs.frozen
class PoolRecord:
    """One VM of the pool. Its id is that of the sandbox which it becomes: nothing is named anew then."""

    id: str  # 32 hex digits
    token: str  # the VM's idempotency key, 32 hex digits
    state: PoolState
    cpu_millis: int  # the size that it was made for, as `interface.Size` has it
    memory_bytes: int
    created_at: int
    instance_id: str = ""  # the provider's; "" until it has answered
    address: str = ""
    agent_host: str = ""
    agent_port: int = 0
    message: str = ""  # why it is ENDING, for people
    certificate_until: int = 0  # as a sandbox's
    certificate_key: str = ""
    provider: str = ""  # as a sandbox's
    handler: str = ""  # whose pods may have it

    def to(self, state: PoolState, message: str = "") -> PoolRecord:
        """This record in its next state. :raise IllegalTransition:"""
        return attrs.evolve(
            self, state=follow(TRANSITIONS, self.state, state), message=message or self.message
        )
