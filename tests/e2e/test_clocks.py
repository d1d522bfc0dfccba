# SPDX-License-Identifier: Apache-2.0
"""The clocks of real VMs: set wrong by root, and stopped by the hypervisor."""

from __future__ import annotations

import time

from twisted.trial.unittest import TestCase

from infranetes.machines.agent.client import AgentClient
from infranetes.machines.clock_reading import ClockReading, correct_clock, read_clock
from infranetes.providers.interface import Instance
from infranetes.providers.qemu.provider import QemuProvider
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.e2e.qemu_case import QemuCase
from tests.harness.durations import slow

# Writes a line about once a second: how fast the kernel makes the clock run, and its time.
WATCHER = (
    "while :; do adjtimex | awk '/tick:/ {tick = $3} /tv_sec:/ {seconds = $2} /tv_usec:/ {parts = $2}"
    ' END {printf "%d %d.%06d\\n", tick, seconds, parts}\'; sleep 1; done'
)
OWN_SPEED = 10_000
WRONG_SECONDS = 3
RIGHT_SECONDS = 0.3  # the error of readings here, which include a container's start
ROUND_SECONDS = 150.0  # the node asks each minute, and then the clock has to be slewed by seconds


@slow(150, "the node asks for clocks each minute, and a wrong one is slewed by seconds")
class ClockTests(PodCase):
    """A pod with a container that may set its VM's clock."""

    async def test_a_clock_that_root_has_set_wrong_becomes_right_and_is_never_set_back(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        security = cri.LinuxContainerSecurityContext(privileged=True)
        linux = cri.LinuxContainerConfig(security_context=security)
        self.main = await self.run_container(sandbox, self.box(script=WATCHER, linux=linux))
        await self.until(lambda: self.has_lines(1), "the clock is watched", 60.0)
        self.assertLess(abs(await self.ahead()), RIGHT_SECONDS, "it is right from the beginning")

        await self.put_ahead(WRONG_SECONDS)
        first = self.next_lines()
        await self.restart()
        await self.until(lambda: self.slows_down(first), "the next daemon has it run slower", ROUND_SECONDS)
        await self.until(self.own_speed, "it is right again", ROUND_SECONDS)
        self.assertLess(abs(await self.ahead()), RIGHT_SECONDS, self.lines("main"))
        times = [seconds for _, seconds in self.watched()[first:]]
        self.assertEqual(times, sorted(times), "it never went back")

        await self.put_ahead(-100)  # as after a suspension of that length
        first = self.next_lines()
        await self.until(lambda: self.set_forward(first), "it is set", ROUND_SECONDS)
        self.assertLess(abs(await self.ahead()), RIGHT_SECONDS, self.lines("main"))

    def watched(self) -> list[tuple[int, float]]:
        """Return all readings of the clock's speed and time."""
        return [(int(tick), float(seconds)) for tick, seconds in map(str.split, self.lines("main"))]

    def slows_down(self, first: int) -> bool:
        return any(tick < OWN_SPEED for tick, _ in self.watched()[first:])

    def own_speed(self) -> bool:
        return self.watched()[-1][0] == OWN_SPEED

    def set_forward(self, first: int) -> bool:
        return any(abs(seconds - time.time()) < 30 for _, seconds in self.watched()[first:])

    def next_lines(self) -> int:
        """Return the number of the first line that was written after root last changed the clock."""
        return len(self.lines("main")) + 2

    async def ahead(self) -> float:
        """Return by how many seconds at least the VM's clock is ahead of the node's; below 0: behind."""
        before = time.time()
        answer = await self.execute(self.main, "adjtimex")
        after = time.time()
        self.assertEqual(answer.exit_code, 0, answer.stderr)
        found = dict(line.split(":", 1) for line in answer.stdout.decode().splitlines() if "time.tv" in line)
        seconds, parts = (int(found[f"    time.tv_{name}"]) for name in ("sec", "usec"))
        machine = seconds + parts / 1e6
        return machine - min(max(machine, before), after)

    async def put_ahead(self, seconds: int) -> None:
        """Set the VM's clock wrong, as root in the VM, by `seconds` and up to one more."""
        command = f"date -s @$(($(date +%s) + {seconds} + {int(seconds > 0)}))"
        answer = await self.execute(self.main, "sh", "-c", command)
        self.assertEqual(answer.exit_code, 0, answer.stderr)


PAUSE_SECONDS = 3.0
SECOND = 10**9


class PausedTests(QemuCase, TestCase):
    """A VM that its hypervisor pauses for a while, so that all its clocks stop."""

    async def test_it_has_the_time_again_when_the_node_has_said_it(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        client = self.client(instance)
        before = await self.read(client)
        self.assertLess(abs(before.ahead), RIGHT_SECONDS * SECOND)
        await self.pause(provider, instance)
        # The reading from before the pause is useless, because for all of the VM's clocks no time has passed.
        await client.correct_clock(before.steady, before.earliest, before.latest)
        paused = await self.read(client)
        self.assertLess(paused.ahead, -(PAUSE_SECONDS - RIGHT_SECONDS) * SECOND)
        for _ in range(2):
            await correct_clock(instance.sandbox_id, client, paused)
            after = await self.read(client)
            self.assertLess(abs(after.ahead), RIGHT_SECONDS * SECOND)

    def client(self, instance: Instance) -> AgentClient:
        return AgentClient(instance.sandbox_id, self.channel(instance))

    async def read(self, client: AgentClient) -> ClockReading:
        await client.info()  # connects first, so that connecting does not come between the two times
        _, reading = await read_clock(client.info, time.time_ns)
        self.assertTrue(reading.usable, reading)
        return reading

    async def pause(self, provider: object, instance: Instance) -> None:
        assert isinstance(provider, QemuProvider)
        [vm] = (vm for vm in provider._vms.values() if vm.record.id == instance.id)
        assert vm.connections is not None
        await vm.connections.qmp.execute("stop")
        await self.sleep(PAUSE_SECONDS)
        await vm.connections.qmp.execute("cont")
