# SPDX-License-Identifier: Apache-2.0
"""The VM's usage is read from proc(5)."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from vmserver.stats import machine


class MachineTests(SynchronousTestCase):
    def test_this_machine_has_figures(self) -> None:
        usage = machine.usage(machine.read())
        self.assertGreater(usage.cpu.total_nanos, 0)
        self.assertGreater(usage.memory.limit, usage.memory.working_set)
