"""Parts of the vSphere provider that vcsim alone does not reach: kinds of faults, cards, slow clones."""

from __future__ import annotations

import ssl
from http.client import HTTPException, RemoteDisconnected
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from libcloud.compute.base import Node
from libcloud.compute.types import NodeState
from pyVmomi import vim, vmodl
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import Trouble
from infranetes.providers.cloud.vsphere import sizes
from infranetes.providers.cloud.vsphere.errors import judge
from infranetes.providers.cloud.vsphere.launches import Launches
from infranetes.providers.cloud.vsphere.vms import Vms
from infranetes.providers.interface import InstanceState, ProviderContext
from tests.infranetes.providers.cloud.vsphere_case import VsphereCase
from tests.support.clouds.faults import NEVER
from tests.support.clouds.vsphere import LIST


class FaultTests(SynchronousTestCase):
    """What vCenter's faults mean."""

    def test_each_kind(self) -> None:
        for error, trouble in (
            (vim.fault.InvalidLogin(), Trouble.CREDENTIALS),
            (vim.fault.NoPermission(), Trouble.CREDENTIALS),
            (vim.fault.NotAuthenticated(), Trouble.CREDENTIALS),
            (vim.fault.InsufficientCpuResourcesFault(), Trouble.CAPACITY),
            (vim.fault.InsufficientMemoryResourcesFault(), Trouble.CAPACITY),
            (vim.fault.NoDiskSpace(), Trouble.CAPACITY),
            (vmodl.fault.NotEnoughLicenses(), Trouble.QUOTA),
            (vim.fault.TooManyHosts(), Trouble.QUOTA),
            (vmodl.fault.ManagedObjectNotFound(), Trouble.MISSING),
            (vim.fault.DuplicateName(), Trouble.CONFLICT),
            (vim.fault.TaskInProgress(), Trouble.PASSING),
            (vim.fault.InvalidPowerState(), Trouble.PASSING),
            (vmodl.fault.SystemError(), Trouble.PASSING),
            (vmodl.RuntimeFault(), Trouble.PASSING),
            (vmodl.fault.InvalidArgument(), Trouble.INVALID),
            (vim.fault.CustomizationFault(), Trouble.BROKEN),
            (ExpatError("syntax error"), Trouble.PASSING),
            (RemoteDisconnected("gone"), Trouble.PASSING),
            (HTTPException("503 Service Unavailable"), Trouble.PASSING),
            (HTTPException("429 Too Many Requests"), Trouble.THROTTLED),
            (HTTPException("401 Unauthorized"), Trouble.CREDENTIALS),
            (ssl.SSLCertVerificationError(), Trouble.INVALID),
        ):
            found = judge(error)
            self.assertIs(found and found.trouble, trouble, repr(error))

    def test_what_is_not_vspheres_own_is_left_to_others(self) -> None:
        self.assertIsNone(judge(TimeoutError()))

    def test_the_privilege_that_lacks_is_named(self) -> None:
        found = judge(vim.fault.NoPermission(privilegeId="VirtualMachine.Interact.PowerOn"))
        self.assertIn("VirtualMachine.Interact.PowerOn", str(found))


class SizeTests(SynchronousTestCase):
    def test_a_name_says_what_it_is(self) -> None:
        for offer in sizes.offers():
            cpus, mib = sizes.parse(offer.name)
            self.assertEqual((offer.cpu_millis, offer.memory_bytes), (cpus * 1000, mib << 20))

    def test_they_are_close_together(self) -> None:
        memory = sorted({offer.memory_bytes for offer in sizes.offers()})
        self.assertEqual((memory[0] >> 20, memory[-1] >> 40), (512, 1))
        self.assertTrue(all(more <= less * 1.5 for less, more in pairwise(memory)))


class AddressTests(SynchronousTestCase):
    """Which of what VMware Tools tell is the pod's address."""

    def told(self, *cards: tuple[int, list[str]], address: str = "", network: str = "") -> str:
        vms = Vms(ProviderContext(Path("s"), Path("r"), "cluster", "node"), Launches(), network)
        nics = [vim.vm.GuestInfo.NicInfo(deviceConfigId=key, ipAddress=ips) for key, ips in cards]
        extra = {"cards": nics, "cpus": 1, "memory_mib": 512, "vm": None}
        name = vms.name("a" * 32, 0)
        node = Node("vm-1", name, NodeState.RUNNING, [], [address] if address else [], None, extra=extra)
        driver: Any = None  # a VM that runs is asked for nothing
        found = vms.found(driver, name, node, frozenset())
        self.assertIs(found.state, InstanceState.RUNNING if found.private_address else InstanceState.PENDING)
        return found.private_address

    def test_the_cards_and_not_a_bridges_in_the_machine(self) -> None:
        self.assertEqual(
            self.told((-1, ["172.17.0.1"]), (4000, ["10.0.0.5"]), address="172.17.0.1"), "10.0.0.5"
        )
        self.assertEqual(self.told((-1, ["172.17.0.1"]), address="172.17.0.1"), "")

    def test_the_one_of_version_4_where_there_is_one(self) -> None:
        self.assertEqual(self.told((4000, ["fe80::1", "fd00::5", "10.0.0.5"])), "10.0.0.5")
        self.assertEqual(self.told((4000, ["fe80::1", "fd00::5"])), "fd00::5")

    def test_none_that_is_no_address_of_a_pod(self) -> None:
        for text in ("169.254.1.1", "fe80::1", "0.0.0.0", "224.0.0.1", "nonsense", "10.0.0.5/24"):
            self.assertEqual(self.told((4000, [text])), "", text)
        self.assertEqual(self.told((4000, ["10.0.0.5"]), network="10.1.0.0/16"), "")


class SlowCloneTests(VsphereCase, TestCase):
    """A clone that takes minutes: the task runs on, and no thread waits for it."""

    async def slow(self) -> tuple[Any, Any]:
        """A provider, and a VM whose clone goes on."""
        self.world.behaviour = NEVER
        self.world.slow_clones.on = True
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        self.assertIs(launched.state, InstanceState.PENDING)
        return provider, launched

    async def test_it_is_known_meanwhile_and_powered_on_then(self) -> None:
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

    async def test_the_next_daemon_finds_what_comes_of_it(self) -> None:
        provider, launched = await self.slow()
        await self.within(provider.stop())
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [])
        await self.world.release_clones()
        [found] = await self.within(provider.list())
        self.assertEqual((found.id, found.sandbox_id), (launched.id, launched.sandbox_id))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])
