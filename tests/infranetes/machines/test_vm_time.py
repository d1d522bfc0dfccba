# SPDX-License-Identifier: Apache-2.0
"""The time in a VM from its boot on, with minutes and hours that a test lets pass on the node and the VM.

Both sides run real code, except for the transport between them: the node stamps the identity and sends
requests; the VM takes on the identity and corrects its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from infranetes_common.identity import Identity
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.vmserver.fake_clock import SECOND, FakeClock
from vmserver.identity.apply import IdentityApplier
from vmserver.machine.clock import MachineClock
from vmserver.machine.system_clock import TICKS
from vmserver.machine.timekeeping import Timekeeping

BEGIN = 1_800_000_000.0  # seconds since 1970
BOOT_SECONDS = 45  # of an instance of a cloud
STEP_SECONDS = 0.25
RIGHT = SECOND // 20


class _Machine(FakeAgent):
    """A VM whose agent corrects its clock. :ivar lowest: what the clock said last."""

    def __init__(self, sandbox_id: str, etc: Path, system: FakeClock) -> None:
        super().__init__(sandbox_id)
        self._etc = etc
        self.system = system
        self.lowest = system.now()
        self.clocks = lambda: (self.system.now(), self._timekeeping.reading())
        self.begin()

    def begin(self) -> None:
        """The agent starts."""
        self._reactor = Clock()
        self._timekeeping = Timekeeping(self._reactor, self.system)
        self._timekeeping.begin()

    def take(self, identity: Identity) -> None:
        """Take on the identity that is ready in the cloud."""
        applied = attrs.evolve(identity, hostname="", machine_id="", entropy="")  # to the clock alone
        IdentityApplier(self._etc, clock=MachineClock(self.system)).apply(applied)

    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        await super().correct_clock(steady, earliest, latest)
        self._timekeeping.correct(steady, earliest, latest)

    def pass_time(self, seconds: float) -> None:
        before = self.system.now()
        self.system.pass_time(seconds)
        self._reactor.advance((self.system.now() - before) / SECOND)
        assert self.system.now() >= self.lowest, "time goes back"
        self.lowest = self.system.now()


class _Node(FakeNode):
    """:ivar rtc: how far new VMs' clocks are ahead. :ivar drift: that of their clocks, as in `FakeClock`."""

    rtc = 0
    drift = 0.0
    etc: Path

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        return _Machine(sandbox_id, self.etc, FakeClock(self.now() + self.rtc, self.drift))

    def machines(self) -> Sequence[_Machine]:
        return [each for each in self.agents.values() if isinstance(each, _Machine)]

    def wait(self, seconds: float, step: float = STEP_SECONDS) -> None:
        for _ in range(int(seconds / step)):
            for machine in self.machines():
                machine.pass_time(step)
            self.clock.advance(step)


class VmTimeTests(PodsTestCase):
    world: _Node

    def make_world(self) -> FakeNode:
        self.patch(Clock, "rightNow", BEGIN)
        world = _Node(launch=120.0, sweep=1e6)
        world.etc = Path(self.mktemp())
        world.etc.mkdir()
        return world

    def booted(self, rtc: int = 0, drift: float = 0.0) -> _Machine:
        """Run a pod whose VM takes a while to boot. :param rtc: how far its clock is ahead before that."""
        self.world.rtc, self.world.drift = rtc, drift
        booting: Deferred[None] = Deferred()
        self.world.provider.booting = booting
        self.launch = self.world.now()
        running = self.start(pod())
        self.world.wait(BOOT_SECONDS)
        [machine] = self.world.machines()
        [spec] = self.world.provider.specs
        self.assertEqual(spec.identity.now_nanos, self.launch, "written before the boot")
        machine.take(spec.identity)
        booting.callback(None)
        self.successResultOf(running)
        return machine

    def ahead(self, machine: _Machine) -> int:
        return machine.system.now() - self.world.now()

    def test_a_boot_of_45_seconds_costs_no_time(self) -> None:
        machine = self.booted()
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        self.assertEqual(machine.system.settings, [])

    def test_a_clock_that_was_behind_is_right_when_the_pod_is_ready(self) -> None:
        machine = self.booted(rtc=-3600 * SECOND)
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        stamped, told = machine.system.settings
        self.assertEqual(stamped, self.launch, "by the identity")
        self.assertApproximates(told, self.launch + BOOT_SECONDS * SECOND, RIGHT)

    def test_a_clock_that_was_ahead_becomes_right_and_does_not_go_back(self) -> None:
        machine = self.booted(rtc=30 * SECOND)
        self.assertApproximates(self.ahead(machine), 30 * SECOND, RIGHT)
        self.world.wait(360)
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        self.assertEqual((machine.system.settings, machine.system.ticks()), ([], TICKS))

    def test_a_clock_that_runs_too_fast_or_slow_stays_right_for_hours(self) -> None:
        for drift in (0.0005, -0.0005):
            machine = self.booted(drift=drift)
            for _ in range(12):
                self.world.wait(600)
                self.assertLess(abs(self.ahead(machine)), RIGHT, drift)
            self.assertEqual(machine.system.settings, [])
            self.world.kill()
            self.world = self.make_world()  # type: ignore[assignment]
            self.world.provider_ready()

    def test_a_vm_that_was_suspended_has_the_time_within_two_minutes(self) -> None:
        machine = self.booted()
        self.world.clock.rightNow += 600  # on the node, not in the VM
        self.assertLess(self.ahead(machine), -599 * SECOND)
        self.world.wait(120)
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        self.assertEqual(len(machine.system.settings), 1)

    def test_a_node_that_was_set_back_does_not_set_back_its_vms(self) -> None:
        machine = self.booted()
        self.world.clock.rightNow -= 5  # by its administrator
        self.world.wait(180)
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        self.assertEqual((machine.system.settings, machine.system.ticks()), ([], TICKS))

    def test_neither_the_nodes_daemon_nor_the_agent_has_to_survive(self) -> None:
        machine = self.booted()
        machine.system.set(machine.system.now() + 10 * SECOND)
        machine.lowest = machine.system.now()
        self.world.wait(70)
        self.assertNotEqual(machine.system.ticks(), TICKS, "it is on its way")
        self.world.restart()
        machine.begin()  # after the previous agent was killed
        self.assertEqual(machine.system.ticks(), TICKS)
        self.world.wait(240)
        self.assertLess(abs(self.ahead(machine)), RIGHT)
        self.assertEqual(machine.system.ticks(), TICKS)
