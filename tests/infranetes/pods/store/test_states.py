# SPDX-License-Identifier: Apache-2.0
"""The states of sandboxes and containers."""

from __future__ import annotations

from typing import Any

from twisted.trial import unittest

from infranetes.machines.pool_record import TRANSITIONS
from infranetes.pods.store import states
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes_common.transitions import IllegalTransition, follow


class StateTests(unittest.SynchronousTestCase):
    """Only what the tables allow may follow."""

    def test_every_state_is_in_its_table(self) -> None:
        self.assertEqual(set(states.SANDBOX_TRANSITIONS), set(SandboxState))
        self.assertEqual(set(states.CONTAINER_TRANSITIONS), set(ContainerState))

    def test_the_first_states_lead_to_every_other(self) -> None:
        for first, table in (
            ({SandboxState.LAUNCHING, SandboxState.VACANT}, states.SANDBOX_TRANSITIONS),
            ({ContainerState.CREATING}, states.CONTAINER_TRANSITIONS),
        ):
            reached, ahead = {*first}, [*first]
            while ahead:
                for after in table[ahead.pop()] - reached:  # type: ignore[index]
                    reached.add(after)
                    ahead.append(after)
            self.assertEqual(reached, set(table))

    def test_there_is_no_way_back_but_to_a_sandbox_without_a_vm(self) -> None:
        round_trip = {SandboxState.VACANT, SandboxState.BOOTING, SandboxState.READY}
        for table in (states.SANDBOX_TRANSITIONS, states.CONTAINER_TRANSITIONS):
            for before in table:
                if before not in round_trip:
                    self.assertNotIn(before, _reachable(table, before))
        to_ready = {one for one, after in states.SANDBOX_TRANSITIONS.items() if SandboxState.READY in after}
        self.assertEqual(to_ready, {SandboxState.LAUNCHING, SandboxState.BOOTING})

    def test_what_is_not_in_the_table_raises(self) -> None:
        tables: tuple[Any, ...] = (states.SANDBOX_TRANSITIONS, states.CONTAINER_TRANSITIONS, TRANSITIONS)
        for table in tables:
            for before, allowed in table.items():
                for after in set(table) - allowed:
                    self.assertRaises(IllegalTransition, follow, table, before, after)
                for after in allowed:
                    self.assertIs(follow(table, before, after), after)

    def test_a_launch_is_never_shown(self) -> None:
        self.assertNotIn(SandboxState.LAUNCHING, states.SHOWN_SANDBOXES)
        self.assertNotIn(SandboxState.ABANDONED, states.SHOWN_SANDBOXES)


def _reachable(table: Any, start: Any) -> set[Any]:
    reached: set[Any] = set()
    ahead = [start]
    while ahead:
        for after in table[ahead.pop()] - reached:
            reached.add(after)
            ahead.append(after)
    return reached
