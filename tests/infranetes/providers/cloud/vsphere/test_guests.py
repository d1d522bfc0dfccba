# SPDX-License-Identifier: Apache-2.0
"""VMs without our agent on a simulated vCenter."""

from __future__ import annotations

import base64
import json
from typing import Any

from pyVmomi import vim
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.interface import LaunchRequest
from infranetes.providers.cloud.vsphere import guest_info
from infranetes.providers.cloud.vsphere.pyvmomi_types import VirtualDevice
from infranetes.providers.cloud.vsphere.specs import Template, clone
from infranetes.providers.hypervisor import GuestState
from infranetes_common.identity import Network
from tests.infranetes.providers.cloud.guest_case import USER_DATA, GuestCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcsim

ADDRESSES = {"addresses": "127.78.0.0/16", "gateway": "127.78.0.1", "address_ranges": ["127.78.240.10"]}


class VsphereGuestTests(GuestCase, VsphereCase, TestCase):
    """A VM that powers off stays until it is destroyed; a suspended one has failed."""

    failure = "suspended"

    def setUp(self) -> Any:
        result = super().setUp()
        self.settings["consoles_datastore"] = "LocalDS_0"
        return result

    def user_data(self) -> bytes:
        [told] = self.world.guests.user_data.values()
        return bytes(told)

    def fail_vm(self, id: str) -> None:
        self.world.suspend(id)

    def extra(self) -> dict[str, str]:
        """Return the extraConfig of the only VM."""
        [vm] = self.world.vms()
        return vcsim.extra_config(vm)

    def ports(self) -> list[Any]:
        """Return the serial ports of the only VM."""
        [vm] = self.world.vms()
        devices = vm.config.hardware.device
        return [each for each in devices if isinstance(each, vim.vm.device.VirtualSerialPort)]

    async def test_guestinfo_has_no_identity_of_an_agent(self) -> None:
        await self.prepared()
        told = [key for key in self.extra() if key.startswith("guestinfo.")]
        self.assertEqual(
            sorted(told),
            [f"guestinfo.{key}{what}" for key in ("metadata", "userdata") for what in ("", ".encoding")],
        )

    async def test_one_that_is_told_nothing_has_nothing_in_guestinfo(self) -> None:
        self.provider = await self.started()
        await self.running(self.provider, await self.request(b""))
        self.assertEqual([key for key in self.extra() if key.startswith("guestinfo.")], [])

    async def test_an_address_of_the_nodes_is_told_by_guestinfo(self) -> None:
        self.settings |= ADDRESSES
        instance, _ = await self.prepared()
        self.assertEqual(instance.address, "127.78.240.10")
        told = json.loads(base64.b64decode(self.extra()["guestinfo.metadata"]))
        self.assertEqual(told["instance-id"], instance.id)
        card = told["network"]["ethernets"]["pod"]
        self.assertEqual(card["addresses"], ["127.78.240.10/16"])
        [vm] = self.world.vms()
        macs = [each.macAddress for each in vm.config.hardware.device if hasattr(each, "macAddress")]
        self.assertIn(card["match"]["macaddress"], macs)

    async def test_until_vmware_tools_run_it_can_not_be_asked_to_power_off(self) -> None:
        _, hypervisor = await self.prepared()
        self.world.have_tools = False
        await hypervisor.execute()
        await hypervisor.press_power_button()
        self.assertEqual(self.world.guests.pressed, [])
        self.world.have_tools = True
        status = await self.told(hypervisor, hypervisor.press_power_button)
        self.assertIs(status.state, GuestState.OFF)

    async def test_its_console_is_read_only_as_far_as_it_is_new_and_goes_with_it(self) -> None:
        instance, hypervisor = await self.prepared()
        console: Any = hypervisor.console
        [port] = self.ports()
        file = f"[LocalDS_0] infranetes-consoles/{instance.id}.log"
        self.assertEqual(port.backing.fileName, file)
        self.assertIn(f"console of {instance.id}", self.world.held())
        self.world.guests.say(instance.id, "".join(f"line {number}\n" for number in range(40_000)))
        await console.look()
        self.world.guests.say(instance.id, "and more\n")
        self.world.end_sessions()
        await console.look()
        said = await console.read(console.begin, console.end - console.begin)
        self.assertTrue(said.endswith(b"line 39999\nand more\n"), said[-100:])
        whole = len(self.world.guests.consoles[instance.id])
        self.assertGreater(self.world.consoles.ranges[-1][0], whole - (130 << 10), "the rest is known")
        await self.provider.destroy(instance.id)
        self.assertEqual(self.world.consoles.there, {})

    async def test_a_file_without_its_vm_is_swept(self) -> None:
        self.settings["sweep_seconds"] = 0.2
        instance, hypervisor = await self.prepared()
        await hypervisor.execute()
        await self.told(hypervisor, lambda: self.world.end(instance.id))
        await self.sleep(0.7)
        self.assertEqual(list(self.world.consoles.there), [instance.id], "its VM is there, though it is off")
        vcsim.done(self.world.vm(instance.id).Destroy_Task())
        await self.provider.list()  # as the daemon's sweep does
        await self.until(lambda: not self.world.consoles.there, "the file is swept")

    async def test_without_a_datastore_for_consoles_none_is_kept_and_the_log_says_so(self) -> None:
        del self.settings["consoles_datastore"]
        _, hypervisor = await self.prepared()
        said = await hypervisor.console.read(0, 1000)
        self.assertIn(b"consoles_datastore", said)
        self.assertEqual((self.ports(), self.world.consoles.there), ([], {}))

    async def test_a_vm_with_our_agent_has_no_console(self) -> None:
        provider = await self.started()
        await self.running(provider, self.spec())
        self.assertEqual((self.ports(), self.world.consoles.there), ([], {}))

    async def test_its_serial_port_never_lets_it_wait_for_an_answer(self) -> None:
        """Which it would if its file exists, as when it is powered on again on another host."""
        await self.prepared()
        self.assertEqual(self.extra()["answer.msg.serial.file.open"], "Append")
        [clone] = self.world.asked("CloneVM_Task")
        self.assertIn("VirtualSerialPort", clone["body"])


class SerialPortTests(SynchronousTestCase):
    def changes(self, serial: VirtualDevice | None) -> list[Any]:
        """Return what a clone changes in the serial ports of its template."""
        request = LaunchRequest("t", "s", 0, {}, b"", Wishes(), agentless=True, size="1cpu-1024mib")
        template = Template("vm-1", "", "t", True, serial=serial)
        pool, network = vim.ResourcePool("pool"), vim.vm.device.VirtualEthernetCard.NetworkBackingInfo()
        spec: Any = clone("n", request, template, pool, None, network, 0.0, console="[ds] f/n.log")
        devices = spec.config.deviceChange
        return [each for each in devices if isinstance(each.device, vim.vm.device.VirtualSerialPort)]

    def test_the_templates_first_one_is_used_if_it_has_one(self) -> None:
        [edited] = self.changes(vim.vm.device.VirtualSerialPort(key=9000))
        self.assertEqual((edited.operation, edited.device.key), ("edit", 9000))
        [added] = self.changes(None)
        self.assertEqual(added.operation, "add")
        for each in (added, edited):
            self.assertEqual(each.device.backing.fileName, "[ds] f/n.log")


class GuestInfoTests(SynchronousTestCase):
    NETWORK = Network("00:50:56:00:00:01", "10.2.0.7/16", "10.2.0.1")

    def test_an_address_is_told_even_if_nothing_else_is(self) -> None:
        told = guest_info.options("vm-1", b"", self.NETWORK)
        self.assertEqual(set(told), {guest_info.META_DATA, f"{guest_info.META_DATA}.encoding"})
        self.assertEqual(guest_info.options("vm-1", b"", None), {})

    def test_user_data_is_told_as_it_is(self) -> None:
        told = guest_info.options("vm-1", USER_DATA, None)
        self.assertEqual(base64.b64decode(told[guest_info.USER_DATA]), USER_DATA)
        self.assertEqual(json.loads(base64.b64decode(told[guest_info.META_DATA])), {"instance-id": "vm-1"})
