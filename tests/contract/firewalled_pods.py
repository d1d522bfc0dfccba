# SPDX-License-Identifier: Apache-2.0
"""The contract of everything that enforces pods' firewalls: one suite, which also makes each call twice.

The test module of an implementation has, for instance::

    class FirewalledPodsTests(FirewalledPodsContract, TestCase):
        stranger = "198.18.0.2"

        async def enforcer(self): ...
        async def machine(self, enforcer): ...

An implementation that enforces them outside of VMs uses `ClosedPodsContract` instead of
`FirewalledPodsContract`.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network
from typing import ClassVar, Protocol

from zope.interface.verify import verifyObject

from infranetes.providers.interface import IFirewallsPods
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from tests.support.failures import FailureAssertions


class Talk(Protocol):
    """A connection of the stranger's to a VM."""

    async def goes_on(self, expected: bool) -> bool:
        """Return whether the VM answers. The suite first expects no answer, and then once an answer."""


class FirewalledPodsContract(FailureAssertions):
    """The promises of `IFirewallsPods` about firewalls that were set."""

    stranger: ClassVar[str]  # the address of a machine that is neither the node nor a pod

    # Hooks.

    async def enforcer(self) -> IFirewallsPods:
        """Return the implementation under test, on a node that enforces firewalls; it knows no VM yet."""
        raise NotImplementedError

    async def machine(self, enforcer: IFirewallsPods) -> str:
        """Make a running VM; return its id."""
        raise NotImplementedError

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        """Replace the daemon by the next one, which finds the VMs."""
        raise NotImplementedError

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        """Destroy a VM."""
        raise NotImplementedError

    def break_enforcing(self) -> Callable[[], None]:
        """Make putting firewalls in force fail from now on. Return a function that repairs it."""
        raise NotImplementedError

    async def port(self, machine: str) -> int:
        """Return a TCP port that the VM serves."""
        raise NotImplementedError

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        """Return whether the VM's node, or else the stranger, can connect to the VM's port."""
        raise NotImplementedError

    async def talk(self, machine: str) -> Talk:
        """Connect the stranger to the VM's port."""
        raise NotImplementedError

    # Helpers.

    async def verified(self) -> IFirewallsPods:
        """Return the implementation under test, verified to provide its interface."""
        enforcer = await self.enforcer()
        verifyObject(IFirewallsPods, enforcer)
        return enforcer

    async def say(self, enforcer: IFirewallsPods, machine: str, firewall: PodFirewall) -> None:
        for _ in range(2):
            await enforcer.set_firewall(machine, firewall)

    def for_stranger(self, port: int) -> PodFirewall:
        """Return a firewall that admits only the stranger, on one port."""
        network = ip_network(f"{self.stranger}/32")
        return PodFirewall(ingress=(Allowed((network,), (Ports("TCP", port, port),)),), egress=())

    async def assert_reached(self, machine: str, expected: bool) -> None:
        """Assert whether the stranger reaches the VM, and that its node does in any case."""
        self.assertEqual(await self.reaches(machine, False, expected), expected)
        self.assertTrue(await self.reaches(machine, True, True))

    # The promises.

    async def test_what_was_said_last_is_in_force_for_that_vm_alone(self) -> None:
        enforcer = await self.verified()
        machine, other = [await self.machine(enforcer) for _ in range(2)]
        await self.say(enforcer, other, CLOSED)
        port = await self.port(machine)
        for firewall, expected in (
            (OPEN, True),
            (CLOSED, False),
            (self.for_stranger(port), True),
            (self.for_stranger(port + 1), False),
            (self.for_stranger(port), True),
        ):
            await self.say(enforcer, machine, firewall)
            await self.assert_reached(machine, expected)
        await self.assert_reached(other, False)

    async def test_connections_that_there_are_are_judged_too(self) -> None:
        enforcer = await self.verified()
        machine = await self.machine(enforcer)
        await self.say(enforcer, machine, OPEN)
        talk = await self.talk(machine)
        await self.say(enforcer, machine, CLOSED)
        self.assertFalse(await talk.goes_on(False))
        await self.say(enforcer, machine, self.for_stranger(await self.port(machine)))
        self.assertTrue(await talk.goes_on(True), "it goes on once it may")

    async def test_a_firewall_outlives_the_daemon(self) -> None:
        enforcer = await self.verified()
        one, other = [await self.machine(enforcer) for _ in range(2)]
        await self.say(enforcer, one, self.for_stranger(await self.port(one)))
        await self.say(enforcer, other, CLOSED)
        for _ in range(2):
            enforcer = await self.next_daemon(enforcer)
            await self.assert_reached(one, True)
            await self.assert_reached(other, False)
        await self.say(enforcer, other, OPEN)
        await self.assert_reached(other, True)

    async def test_one_that_can_not_be_put_in_force_leaves_the_one_before(self) -> None:
        enforcer = await self.verified()
        machine = await self.machine(enforcer)
        await self.say(enforcer, machine, self.for_stranger(await self.port(machine)))
        mend = self.break_enforcing()
        for _ in range(2):
            await self.fails(Unavailable, enforcer.set_firewall(machine, CLOSED))
            await self.assert_reached(machine, True)
        mend()
        enforcer = await self.next_daemon(enforcer)
        await self.assert_reached(machine, True)
        await self.say(enforcer, machine, CLOSED)
        await self.assert_reached(machine, False)

    async def test_a_vm_that_there_is_not_is_refused(self) -> None:
        enforcer = await self.verified()
        machine = await self.machine(enforcer)
        await self.say(enforcer, machine, OPEN)
        await self.destroy(enforcer, machine)
        for _ in range(2):
            await self.fails(NotFound, enforcer.set_firewall(machine, OPEN))


class ClosedPodsContract(FirewalledPodsContract):
    """The promises of `IFirewallsPods`, including those about VMs whose firewalls were not set."""

    async def idle_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        """Replace the daemon by one that is not to enforce firewalls, and finds the VMs."""
        raise NotImplementedError

    async def test_a_vm_is_closed_until_its_firewall_is_said_if_it_is_to_have_one(self) -> None:
        enforcer = await self.verified()
        machine = await self.machine(enforcer)
        await self.assert_reached(machine, False)
        enforcer = await self.next_daemon(enforcer)
        await self.assert_reached(machine, False)
        await self.say(enforcer, machine, OPEN)
        await self.assert_reached(machine, True)
        await self.say(enforcer, machine, CLOSED)
        enforcer = await self.idle_daemon(enforcer)
        await self.assert_reached(machine, True)
        for firewall in (OPEN, CLOSED):
            await self.fails(FailedPrecondition, enforcer.set_firewall(machine, firewall))
        await self.assert_reached(machine, True)
        verifyObject(IFirewallsPods, enforcer)
