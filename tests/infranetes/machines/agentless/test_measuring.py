# SPDX-License-Identifier: Apache-2.0
"""A guest's usage is made of what a command of its own prints."""

from __future__ import annotations

import subprocess

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.measuring import COMMAND, MAX_OUTPUT, Measuring

STAT = b"/proc/stat:cpu  1000 200 300 40000 50 6 7 80 0 0\n/proc/stat:intr 5\n"
REST = (
    b"/proc/meminfo:MemTotal:  524288 kB\n/proc/meminfo:MemFree:  262144 kB\n"
    b"/proc/net/dev:Inter-|\n/proc/net/dev: face |bytes\n"
    b"/proc/net/dev: eth0:  5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n"
)


class MeasuringTests(SynchronousTestCase):
    """What the command prints."""

    def test_this_machine_is_measured_by_its_own_grep(self) -> None:
        done = subprocess.run(COMMAND, capture_output=True, timeout=60)
        found = Measuring().response(done.stdout, 5)
        assert found is not None
        self.assertGreater(found.machine.cpu.total_nanos, 0)
        self.assertGreater(found.machine.memory.limit, found.machine.memory.working_set)

    def test_processors_memory_and_cards(self) -> None:
        found = Measuring().response(STAT + REST, 5)
        assert found is not None
        self.assertEqual((found.machine.time_nanos, found.machine.cpu.total_nanos), (5, 15_130_000_000))
        self.assertEqual(found.machine.memory.usage, 256 << 20)
        self.assertEqual([(card.name, card.received_bytes) for card in found.cards], [("eth0", 5)])

    def test_the_second_measurement_has_a_rate(self) -> None:
        measuring = Measuring()
        first = measuring.response(STAT + REST, 10**9)
        second = measuring.response(STAT.replace(b"1000", b"1100") + REST, 3 * 10**9)
        assert first is not None
        assert second is not None
        self.assertFalse(first.machine.cpu.HasField("nano_cores"))
        self.assertEqual(second.machine.cpu.nano_cores.value, 5 * 10**8)

    def test_what_is_no_linux_has_no_figures(self) -> None:
        for printed in (b"", b"'grep' is not recognized", STAT, REST, b"/proc/../etc/passwd:cpu 1 2 3\n"):
            self.assertIsNone(Measuring().response(printed, 5))

    def test_endless_and_senseless_output_is_bounded(self) -> None:
        for line in (b"\n", b"/proc/stat:\n", b"\xff\n", b"/proc/net/dev:" + b"9" * 100 + b"\n"):
            self.assertIsNone(Measuring().response(line * MAX_OUTPUT, 5))
