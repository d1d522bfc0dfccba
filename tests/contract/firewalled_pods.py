# SPDX-License-Identifier: Apache-2.0
"""What everything does that has pods' firewalls in force: one suite, each call also made twice.

An implementation's own test module has, for instance::

    class FirewalledPodsTests(FirewalledPodsContract, TestCase):
        stranger = "198.18.0.2"

        async def enforcer(self): ...
        async def machine(self, enforcer): ...

Who enforces them outside of VMs has `ClosedPodsContract` for `FirewalledPodsContract`.
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
        """Whether the VM answers. It is asked for what is not expected first, and once for what is."""


class FirewalledPodsContract(FailureAssertions):
    """The promises of `IFirewallsPods` about firewalls that were said."""

    stranger: ClassVar[str]  # the address of somebody who is neither the node nor a pod

    # Hooks.

    async def enforcer(self) -> IFirewallsPods:
        """What is tested, on a node that is to enforce firewalls; it knows no VM yet."""
        raise NotImplementedError

    async def machine(self, enforcer: IFirewallsPods) -> str:
        """Make a VM that runs; return its id."""
        raise NotImplementedError

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        """Have the daemon go and the next one come, which finds the VMs."""
        raise NotImplementedError

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        """Destroy a VM."""
        raise NotImplementedError

    def break_enforcing(self) -> Callable[[], None]:
        """Have no firewall be put in force from now on. Returns what mends that."""
        raise NotImplementedError

    async def port(self, machine: str) -> int:
        """A TCP port that the VM serves."""
        raise NotImplementedError

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        """Whether the VM's port can be connected to, by its node or by the stranger."""
        raise NotImplementedError

    async def talk(self, machine: str) -> Talk:
        """Have the stranger connect to the VM's port."""
        raise NotImplementedError

    # Helpers.

    async def verified(self) -> IFirewallsPods:
        """What is tested, which is at least shaped as it has to be."""
        enforcer = await self.enforcer()
        verifyObject(IFirewallsPods, enforcer)
        return enforcer

    async def say(self, enforcer: IFirewallsPods, machine: str, firewall: PodFirewall) -> None:
        for _ in range(2):
            await enforcer.set_firewall(machine, firewall)

    def for_stranger(self, port: int) -> PodFirewall:
        """Closed but for the stranger, on one port."""
        network = ip_network(f"{self.stranger}/32")
        return PodFirewall(ingress=(Allowed((network,), (Ports("TCP", port, port),)),), egress=())

    async def assert_reached(self, machine: str, expected: bool) -> None:
        """By the stranger; the node always reaches it."""
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
    """The promises of `IFirewallsPods` about VMs whose firewalls were not said, too."""

    async def idle_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        """Have the daemon go and one come that is to enforce no firewalls, which finds the VMs."""
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
