# SPDX-License-Identifier: Apache-2.0
"""What vcsim alone can't show: kinds of faults, network cards, slow clones."""

from __future__ import annotations

import ssl
from http.client import HTTPException, RemoteDisconnected
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.parsers.expat import ExpatError

from libcloud.compute.base import Node
from libcloud.compute.types import NodeState
from pyVmomi import vim, vmodl
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import ErrorKind
from infranetes.providers.cloud.vsphere import sizes
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.providers.cloud.vsphere.launches import Launches
from infranetes.providers.cloud.vsphere.vms import Tags, VMs
from infranetes.providers.interface import InstanceState, ProviderContext
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcenter_privileges
from tests.support.clouds.faults import NEVER
from tests.support.clouds.soap import LIST


class EventTests(SynchronousTestCase):
    """vCenter's events and the states of VMs, of which either may be told first."""

    def state(self, *, on: bool, has_ended: bool) -> list[InstanceState]:
        """Return the states of a VM that seemed to be off and whose event of powering on is there."""
        vms = VMs(ProviderContext(Path("s"), Path("r"), "cluster", "node"), Launches(), "")
        vms._tags["id"] = Tags("vm", "cluster", "node", "sandbox", "token", 1.0)
        node: Any = Node("id", "vm", NodeState.STOPPED, [], [], None)  # Any: of a node it has what is used
        driver: Any = SimpleNamespace(  # Any: of a driver it has what is used
            ex_has_run=lambda node: True, ex_is_on=lambda node: on, ex_has_ended=lambda node: has_ended
        )
        return [vms._thd_state(driver, "vm", node, vms.have_run())[0] for _ in range(2)]

    def test_a_vm_whose_event_comes_before_its_state_has_not_ended(self) -> None:
        first, _ = self.state(on=False, has_ended=False)
        self.assertIs(first, InstanceState.PENDING)
        first, _ = self.state(on=True, has_ended=False)
        self.assertIs(first, InstanceState.PENDING)

    def test_a_vm_that_was_powered_off_or_stays_off_has_ended(self) -> None:
        self.assertEqual(self.state(on=False, has_ended=True), [InstanceState.ENDED] * 2)
        self.assertIs(self.state(on=False, has_ended=False)[1], InstanceState.ENDED)


class FaultTests(SynchronousTestCase):
    """Kinds of vCenter's faults."""

    def test_each_kind(self) -> None:
        for error, trouble in (
            (vim.fault.InvalidLogin(), ErrorKind.CREDENTIALS),
            (vim.fault.NoPermission(), ErrorKind.CREDENTIALS),
            (vim.fault.NotAuthenticated(), ErrorKind.CREDENTIALS),
            (vim.fault.InsufficientCpuResourcesFault(), ErrorKind.CAPACITY),
            (vim.fault.InsufficientMemoryResourcesFault(), ErrorKind.CAPACITY),
            (vim.fault.NoDiskSpace(), ErrorKind.CAPACITY),
            (vmodl.fault.NotEnoughLicenses(), ErrorKind.QUOTA),
            (vim.fault.TooManyHosts(), ErrorKind.QUOTA),
            (vmodl.fault.ManagedObjectNotFound(), ErrorKind.NOT_FOUND),
            (vim.fault.DuplicateName(), ErrorKind.CONFLICT),
            (vim.fault.TaskInProgress(), ErrorKind.TRANSIENT),
            (vim.fault.InvalidPowerState(), ErrorKind.TRANSIENT),
            (vmodl.fault.SystemError(), ErrorKind.TRANSIENT),
            (vmodl.RuntimeFault(), ErrorKind.TRANSIENT),
            (vmodl.fault.InvalidArgument(), ErrorKind.INVALID),
            (vim.fault.CustomizationFault(), ErrorKind.UNEXPECTED),
            (ExpatError("syntax error"), ErrorKind.TRANSIENT),
            (RemoteDisconnected("gone"), ErrorKind.TRANSIENT),
            (HTTPException("503 Service Unavailable"), ErrorKind.TRANSIENT),
            (HTTPException("429 Too Many Requests"), ErrorKind.THROTTLED),
            (HTTPException("401 Unauthorized"), ErrorKind.CREDENTIALS),
            (ssl.SSLCertVerificationError(), ErrorKind.INVALID),
        ):
            found = classify(error)
            self.assertIs(found and found.kind, trouble, repr(error))

    def test_errors_that_are_not_vspheres_are_not_classified(self) -> None:
        self.assertIsNone(classify(TimeoutError()))

    def test_the_missing_privilege_is_named(self) -> None:
        found = classify(vim.fault.NoPermission(privilegeId="VirtualMachine.Interact.PowerOn"))
        self.assertIn("VirtualMachine.Interact.PowerOn", str(found))


class PrivilegeTests(SynchronousTestCase):
    """The simulated vCenter allows only what the manual's role allows, in all tests."""

    def test_the_role_grants_what_is_needed_and_nothing_else(self) -> None:
        self.assertEqual(vcenter_privileges.granted(), vcenter_privileges.known())

    def test_what_the_role_does_not_grant_is_refused(self) -> None:
        self.assertEqual(vcenter_privileges.missing("PowerOnVM_Task", ""), "")
        self.assertIn("nobody", vcenter_privileges.missing("MigrateVM_Task", ""))


class SizeTests(SynchronousTestCase):
    def test_names_say_cpus_and_memory(self) -> None:
        for offer in sizes.offers():
            cpus, mib = sizes.parse(offer.name)
            self.assertEqual((offer.cpu_millis, offer.memory_bytes), (cpus * 1000, mib << 20))

    def test_sizes_are_close_together(self) -> None:
        memory = sorted({offer.memory_bytes for offer in sizes.offers()})
        self.assertEqual((memory[0] >> 20, memory[-1] >> 40), (512, 1))
        self.assertTrue(all(more <= less * 1.5 for less, more in pairwise(memory)))


class AddressTests(SynchronousTestCase):
    """Choosing the pod's address from VMware Tools' reports."""

    def told(self, *cards: tuple[int, list[str]], address: str = "", network: str = "") -> str:
        vms = VMs(ProviderContext(Path("s"), Path("r"), "cluster", "node"), Launches(), network)
        nics = [vim.vm.GuestInfo.NicInfo(deviceConfigId=key, ipAddress=ips) for key, ips in cards]
        extra = {"cards": nics, "cpus": 1, "memory_mib": 512, "vm": None}
        name = vms.name("a" * 32, 0)
        node = Node("vm-1", name, NodeState.RUNNING, [], [address] if address else [], None, extra=extra)
        driver: Any = None  # not used for a running VM
        found = vms._thd_vm(driver, name, node, frozenset())
        self.assertIs(found.state, InstanceState.RUNNING if found.private_address else InstanceState.PENDING)
        return found.private_address

    def test_addresses_of_cards_and_not_of_bridges_in_the_guest(self) -> None:
        self.assertEqual(
            self.told((-1, ["172.17.0.1"]), (4000, ["10.0.0.5"]), address="172.17.0.1"), "10.0.0.5"
        )
        self.assertEqual(self.told((-1, ["172.17.0.1"]), address="172.17.0.1"), "")

    def test_ipv4_is_preferred(self) -> None:
        self.assertEqual(self.told((4000, ["fe80::1", "fd00::5", "10.0.0.5"])), "10.0.0.5")
        self.assertEqual(self.told((4000, ["fe80::1", "fd00::5"])), "fd00::5")

    def test_invalid_addresses_are_ignored(self) -> None:
        for text in ("169.254.1.1", "fe80::1", "0.0.0.0", "224.0.0.1", "nonsense", "10.0.0.5/24"):
            self.assertEqual(self.told((4000, [text])), "", text)
        self.assertEqual(self.told((4000, ["10.0.0.5"]), network="10.1.0.0/16"), "")


class SlowCloneTests(VsphereCase, TestCase):
    """A clone that takes minutes: no thread waits for its task."""

    async def slow(self) -> tuple[Any, Any]:
        """Return a provider, and a VM whose clone is running."""
        self.world.behaviour = NEVER
        self.world.slow_clones.on = True
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        self.assertIs(launched.state, InstanceState.PENDING)
        return provider, launched

    async def test_it_is_listed_meanwhile_and_powered_on_afterwards(self) -> None:
        self.settings["settle_seconds"] = 0.0
        provider, launched = await self.slow()
        looks = len(self.world.asked(LIST))
        await self.until(lambda: len(self.world.asked(LIST)) > looks + 3, "VMs are looked at a few times")
        self.assertEqual(self.world.names(), [])
        self.assertEqual(await self.within(provider.list()), [launched])
        self.assertEqual(await self.within(provider.get(launched.id)), launched)
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 1)
        await self.world.release_clones()
        await self.until(
            lambda: [vm.runtime.powerState for vm in self.world.vms()] == ["poweredOn"], "it is powered on"
        )
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_it_is_cancelled_when_the_vm_is_destroyed(self) -> None:
        provider, launched = await self.slow()
        await self.within(provider.destroy(launched.id))
        self.assertEqual(len(self.world.asked("CancelTask")), 1)
        self.assertEqual(await self.within(provider.list()), [])

    async def test_the_next_daemon_finds_its_vm(self) -> None:
        provider, launched = await self.slow()
        await self.within(provider.stop())
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [])
        await self.world.release_clones()
        [found] = await self.within(provider.list())
        self.assertEqual((found.id, found.sandbox_id), (launched.id, launched.sandbox_id))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])
