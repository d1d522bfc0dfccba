# SPDX-License-Identifier: Apache-2.0
"""Addresses that a node assigns to its VMs on vSphere: none is assigned twice, none is lost."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Set
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from pyVmomi import vim
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.addresses import (
    ASKED_SECONDS,
    LACKED_SECONDS,
    AddressPool,
    Leases,
    mac_of,
    parse_range,
)
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError, ResourceExhausted
from tests.infranetes.providers.cloud.vsphere.case import SETTINGS, VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NEVER, FaultKind
from tests.support.clouds.vsphere import identity_of

NONE: frozenset[str] = frozenset()


class LeaseCase(SynchronousTestCase):
    """Base class: a clock, and a pool of four addresses."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.seconds = time.time()  # comparable to the files' times
        ranges = (parse_range("10.1.2.1-10.1.2.3"), parse_range("10.1.2.20/31"))
        self.pool = AddressPool(IPv4Network("10.1.2.0/24"), IPv4Address("10.1.2.1"), ranges)
        self.leases = self.daemon()

    def daemon(self) -> Leases:
        """Return the leases as a new daemon reads them."""
        return Leases(self.directory, self.pool, lambda: self.seconds)

    def take(self, name: str) -> str:
        return self.leases._thd_take(name).address.partition("/")[0]

    def list(self, launching: Set[str] = NONE, /, **shown: str) -> None:
        have = {name: {IPv4Address(address)} for name, address in shown.items()}
        self.leases._thd_record_list(have, launching)


class LeaseTests(LeaseCase):
    """One node's leases."""

    def test_each_vm_has_one_and_the_gateway_is_nobodys(self) -> None:
        given = {name: self.take(name) for name in "abcd"}
        self.assertEqual(sorted(given.values()), ["10.1.2.2", "10.1.2.20", "10.1.2.21", "10.1.2.3"])
        self.assertEqual({name: self.take(name) for name in "abcd"}, given)

    def test_a_vm_is_told_the_network_and_a_hardware_address_that_vmware_leaves_to_users(self) -> None:
        network = self.leases._thd_take("a")
        self.assertEqual((network.address, network.gateway), ("10.1.2.2/24", "10.1.2.1"))
        self.assertEqual(network.mac, "00:50:56:01:02:02")
        for text in ("10.255.255.255", "192.168.64.0"):
            self.assertLessEqual(int(mac_of(IPv4Address(text)).split(":")[3], 16), 0x3F)

    def test_without_a_free_one_a_vm_is_refused(self) -> None:
        for name in "abcd":
            self.take(name)
        error = self.assertRaises(CloudError, self.take, "e")
        self.assertEqual((error.kind, "address_ranges" in str(error)), (ErrorKind.QUOTA, True))
        self.leases._thd_give_back("b")
        self.leases._thd_give_back("b")
        self.assertEqual(self.take("e"), "10.1.2.3")

    def test_one_that_was_given_back_is_used_again_last(self) -> None:
        first = self.take("a")
        self.leases._thd_give_back("a")
        later = [self.take(name) for name in "bcd"]
        self.assertNotIn(first, later)
        self.assertEqual(self.take("e"), first)

    def test_the_next_daemon_knows_them(self) -> None:
        given = {name: self.take(name) for name in "ab"}
        self.leases = self.daemon()
        self.assertEqual({name: self.take(name) for name in "ab"}, given)
        self.assertNotIn(self.take("c"), given.values())

    def test_what_only_lists_tell_is_not_given_away(self) -> None:
        """As after the loss of the node's disk, or for VMs that got their addresses by DHCP."""
        self.list(old="10.1.2.2", other="10.9.9.9")
        self.assertEqual([self.take(name) for name in "abc"], ["10.1.2.3", "10.1.2.20", "10.1.2.21"])

    def test_one_whose_vm_was_never_shown_is_free_after_two_hours(self) -> None:
        self.take("a")
        self.leases = self.daemon()
        self.seconds = self.leases_recorded_at() + ASKED_SECONDS - 1
        self.list()
        self.assertEqual(self.held(), ["10.1.2.2"])
        self.seconds += 1
        self.list(frozenset("a"))
        self.assertEqual(self.held(), ["10.1.2.2"])
        self.list()
        self.assertEqual(self.held(), [])

    def test_one_whose_vm_is_gone_is_free_once_lists_agree(self) -> None:
        address = self.take("a")
        self.list(a=address)
        self.list()
        self.seconds += LACKED_SECONDS - 1
        self.list()
        self.list(a=address)  # the earlier lists were stale
        self.seconds += 2
        self.list()
        self.assertEqual(self.held(), [address])
        self.seconds += LACKED_SECONDS
        self.list()
        self.assertEqual(self.held(), [])

    def test_the_next_daemon_frees_one_whose_vm_is_gone_once_lists_agree(self) -> None:
        self.list(a=self.take("a"))
        self.leases = self.daemon()
        self.list()
        self.seconds += LACKED_SECONDS
        self.list()
        self.assertEqual(self.held(), [])

    def test_a_disk_that_takes_no_more_fails_launches_and_no_lists(self) -> None:
        have = self.take("a")
        self.directory.rename(self.directory.with_name("gone"))
        self.directory.write_text("")
        self.list(a=have, old="10.1.2.3")
        error = self.assertRaises(CloudError, self.take, "b")
        self.assertEqual((error.kind, "state_dir" in str(error)), (ErrorKind.TRANSIENT, True))
        self.directory.unlink()
        self.directory.with_name("gone").rename(self.directory)
        self.assertEqual(self.take("b"), "10.1.2.20")

    def test_a_file_that_is_not_whole_keeps_its_address(self) -> None:
        self.take("a")
        (self.directory / "10.1.2.2").write_bytes(b"\xff\0")
        (self.directory / "10.1.2.3.part").write_text("b")
        self.leases = self.daemon()
        self.assertEqual(self.take("c"), "10.1.2.3")

    def held(self) -> list[str]:
        return sorted(file.name for file in self.directory.iterdir())

    def leases_recorded_at(self) -> float:
        return max(file.stat().st_mtime for file in self.directory.iterdir())


class KilledDaemonTests(LeaseCase):
    """Daemons that are killed between any two steps of VMs' lives."""

    def test_no_two_vms_ever_have_the_same_and_all_are_free_in_the_end(self) -> None:
        for seed in range(20):
            self.directory, self.seconds = Path(self.mktemp()), time.time()
            self.leases = self.daemon()
            self.live(random.Random(seed))  # noqa: S311

    def live(self, chance: random.Random) -> None:
        there: dict[str, str] = {}  # in vCenter
        asked: dict[str, str] = {}  # in calls that vCenter has not yet carried out
        names = iter(range(10**6))
        for _ in range(300):
            step = chance.choice(("ask", "serve", "refuse", "list", "destroy", "forget", "kill"))
            name = chance.choice(sorted(there)) if there else ""
            if step == "ask" and len(there) + len(asked) < 4:
                new = f"vm-{next(names)}"
                try:
                    asked[new] = self.take(new)
                except CloudError:
                    continue  # the addresses of destroyed VMs are still reserved
            elif step == "serve" and asked:
                there.update([asked.popitem()])
            elif step == "refuse" and asked:
                self.leases._thd_give_back(asked.popitem()[0])
            elif step == "list":
                self.list(**there)
            elif step == "destroy" and name:
                del there[name]
                self.leases._thd_give_back(name)
            elif step == "forget" and name:
                del there[name]  # the daemon is killed before it has recorded that
                self.leases = self.daemon()
            elif step == "kill":
                self.leases = self.daemon()
            everybodys = [*there.values(), *asked.values()]
            self.assertEqual(len(everybodys), len(set(everybodys)))
        for _ in range(2):
            self.seconds = max(self.seconds, 2e9) + ASKED_SECONDS
            self.list()
        self.assertEqual(list(self.directory.iterdir()), [])


class AddressCase(VsphereCase):
    """Base class: the node assigns addresses, at which no agent listens here."""

    ranges: tuple[str, ...] = ("10.78.240.10-10.78.240.30",)

    def setUp(self) -> Any:
        result = super().setUp()
        self.world.behaviour = NEVER
        self.settings.update(addresses="10.78.0.0/16", gateway="10.78.0.1", address_ranges=list(self.ranges))
        return result

    def held(self) -> list[str]:
        return sorted(file.name for file in (self.state_dir / "vsphere" / "addresses").iterdir())


class GivenAddressTests(AddressCase, TestCase):
    """VMs with addresses that their node assigns."""

    async def test_a_vm_has_it_from_its_identity_and_gives_it_back_with_its_end(self) -> None:
        provider = await self.started()
        spec = self.spec()
        launched = await self.within(provider.launch(spec))
        [vm] = self.world.vms()
        given = json.loads(identity_of(vm))["network"]
        self.assertEqual((given["address"], given["gateway"]), ("10.78.240.10/16", "10.78.0.1"))
        extra = vcsim.extra_config(vm)
        self.assertEqual(extra["infranetes-address"], "10.78.240.10")
        self.assertEqual(extra["guestinfo.infranetes.static"], "true")
        [card] = [
            each for each in vm.config.hardware.device if isinstance(each, vim.vm.device.VirtualEthernetCard)
        ]
        self.assertEqual((card.addressType, card.macAddress), ("manual", given["mac"]))
        self.assertEqual(self.held(), ["10.78.240.10"])
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.held(), [])

    async def test_a_vm_that_reports_another_than_it_was_given_is_not_believed(self) -> None:
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        [vm] = self.world.vms()
        self.world.vcsim.reconfigure(vm, {"SET.guest.ipAddress": "10.78.240.99"})
        self.assertEqual((await self.within(provider.get(launched.id))).address, "")
        self.world.vcsim.reconfigure(vm, {"SET.guest.ipAddress": "10.78.240.10"})
        self.assertEqual((await self.within(provider.get(launched.id))).address, "10.78.240.10")

    async def test_another_network_has_its_addresses_by_dhcp(self) -> None:
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/subnet": vcsim.NETWORKS[1]})
        await self.within(provider.launch(spec))
        [vm] = self.world.vms()
        self.assertIsNone(json.loads(identity_of(vm))["network"])
        self.assertNotIn("guestinfo.infranetes.static", vcsim.extra_config(vm))


class FewAddressesTests(AddressCase, TestCase):
    """A node with one address."""

    ranges = ("10.78.240.40",)

    async def test_a_refused_launch_does_not_keep_it(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, "CloneVM_Task", times=1)
        await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task", times=2)
        await self.refused(ResourceExhausted, provider.launch(self.spec()))
        await self.within(provider.launch(self.spec()))
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("all 1 addresses of address_ranges are taken", str(error))


class SettingsTests(SynchronousTestCase):
    def test_ranges_that_can_not_be_given_are_refused(self) -> None:
        good = {
            **SETTINGS,
            "addresses": "10.1.2.0/24",
            "gateway": "10.1.2.1",
            "address_ranges": ["10.1.2.10-10.1.2.20", "10.1.2.32/28", "10.1.2.9"],
        }
        pool = structure(good, Settings, source="test").address_pool()
        self.assertEqual(len(pool.usable()) if pool is not None else 0, 11 + 16 + 1)
        self.assertIsNone(structure(SETTINGS, Settings, source="test").address_pool())
        for change in (
            {"gateway": ""},
            {"gateway": "10.1.3.1"},
            {"addresses": ""},
            {"addresses": "fd00::/64"},
            {"address_ranges": ["10.1.2.10-10.1.3.20"]},
            {"address_ranges": ["10.1.2.20-10.1.2.10"]},
            {"address_ranges": ["10.1.2.1"]},
            {"address_ranges": ["pods"]},
            {"addresses": "10.0.0.0/8", "address_ranges": ["10.0.0.0/12"]},
        ):
            error = self.assertRaises(ConfigError, structure, {**good, **change}, Settings, source="test")
            self.assertIn("address_ranges", str(error), change)
