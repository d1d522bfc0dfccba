# SPDX-License-Identifier: Apache-2.0
"""A VM is connected to the uplink in its record: the bridge, or a link in somebody else's namespace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import attrs
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.guest.image import GuestImage
from infranetes.providers.interface import Attachment, InstanceSpec, ProviderContext, VmRequest
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.host.uids import UidChoice, parse
from infranetes.providers.qemu.launch.image import ImageLaunches
from infranetes.providers.qemu.launch.launcher import Launcher
from infranetes.providers.qemu.launch.parts import Parts, make_parts
from infranetes.providers.qemu.launch.uplink import UplinkOfRecord
from infranetes.providers.qemu.network import namespaces
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template.ram import SharedRam
from infranetes.providers.qemu.template.template import Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.hypervisors import Hypervisors
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord, VmRecords
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity, Route
from infranetes_common.pod_firewall import CLOSED
from infranetes_common.reactors import installed
from tests.infranetes.providers.qemu.network.test_namespaces import (
    GUEST,
    MAC,
    NamespaceCase,
    arrivals,
    failed,
)
from tests.infranetes.providers.qemu.template.test_template import COMMAND_LINE
from tests.support.dhcp import DISCOVER, REQUEST, Reply, message, replies_on, sent
from tests.support.frames import IPV4, ethernet, udp
from tests.support.waiting import until

reactor = installed()
TOKEN = "0123456789abcdef" * 2
PATHS = ProviderPaths(Path("/nowhere"), Path("/nowhere"))
ME = QemuUser(os.getuid(), os.getgid())


def uplink(joins_namespaces: bool) -> UplinkOfRecord:
    context = ProviderContext(Path("/nowhere"), Path("/nowhere"), "c", "n", joins_namespaces=joins_namespaces)
    return make_parts(reactor, QemuSettings(), context, PATHS).uplink


def vm_of(record: VmRecord) -> Vm:
    return Vm(record, PATHS.of_vm(record, ME))


UIDS = UidChoice(reactor, parse(QemuSettings().uids), lambda: ())


class UplinkTests(NamespaceCase):
    """In a real namespace."""

    def setUp(self) -> None:
        super().setUp()
        self.pod.ip(
            "address add 10.4.0.7/32 dev eth0",
            "address add fd00:4::7/128 dev eth0 nodad noprefixroute",
            "route add 10.4.0.1 dev eth0",
            "link set eth0 mtu 1450",
        )
        # Random, as taps of other runs of these tests are in the node's namespace for a moment.
        token = os.urandom(16).hex()
        record = VmRecord(
            token, "s", "c", "n", "", 0.0, attachment=Attachment(Path(f"/run/netns/{self.pod.name}"))
        )
        self.vm = vm_of(record)
        self.uplink = uplink(True)

    async def test_a_vm_takes_over_what_the_link_has_and_gets_its_frames(self) -> None:
        self.assertEqual(await self.uplink.addresses(self.vm), ["10.4.0.7", "fd00:4::7"])
        network = await self.uplink.guest_network(self.vm)
        self.assertEqual((network.address, network.gateway, network.mtu), ("10.4.0.7/32", "", 1450))
        self.assertEqual(network.routes, (Route("10.4.0.1/32"),))
        tap = open_tap(self.vm.record.tap)
        self.addCleanup(os.close, tap)
        await self.uplink.join(self.vm)
        self.assertIn("mtu 1450", self.pod.said("ip", "link", "show", "dev", self.vm.record.tap))
        frame = ethernet(MAC, network.mac, IPV4, udp("10.4.0.7", "10.4.0.1", b"x"))
        host = self.packets()
        os.write(tap, bytes(10) + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, host.fileno(), frame), 1)
        await self.uplink.leave(self.vm)
        await self.uplink.leave(self.vm)

    async def told(self, tap: int) -> Reply:
        """Return the answer to a request of the VM's."""
        mac = self.vm.taken_over.mac if self.vm.taken_over else GUEST
        os.write(tap, bytes(10) + sent(mac, message(mac, DISCOVER)))
        return (await replies_on(tap))[0]

    async def test_a_vm_is_told_its_network_until_it_leaves_over_daemons(self) -> None:
        tap = open_tap(self.vm.record.tap)
        self.addCleanup(os.close, tap)
        directory = Path(self.mktemp())
        directory.mkdir()
        self.vm.paths = attrs.evolve(self.vm.paths, directory=directory)
        await self.uplink.join(self.vm)
        await self.uplink.tell(self.vm, Names("web-0"))
        reply = await self.told(tap)
        self.assertEqual((reply.given, reply.options[12]), ("10.4.0.7", b"web-0"))
        self.assertFalse(self.uplink.has_address(self.vm))
        await self.uplink.close()
        later, found = uplink(True), vm_of(self.vm.record)
        self.addCleanup(later.close)
        found.paths = self.vm.paths
        await later.resume([found])
        self.assertEqual((await self.told(tap)).options, reply.options)
        mac = reply.client
        os.write(tap, bytes(10) + sent(mac, message(mac, REQUEST, own="10.4.0.7")))
        await until(lambda: later.has_address(found), "that its address is known")
        await later.leave(found)
        self.assertFalse(later.has_address(found))
        self.assertNotIn("dhc", self.pod.said("ip", "link", "show"))

    async def test_one_that_can_not_be_told_any_more_holds_up_nobody(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "dhcp.json").write_text("{}")
        self.vm.paths = attrs.evolve(self.vm.paths, directory=directory)
        with capturedLogs() as events:
            await self.uplink.resume([self.vm])
        self.assertIn("is told its network no more", " ".join(formatEvent(each) or "" for each in events))

    async def test_its_address_is_asked_once(self) -> None:
        await self.uplink.addresses(self.vm)
        self.pod.ip("address flush dev eth0")
        self.assertEqual((await self.uplink.guest_network(self.vm)).address, "10.4.0.7/32")

    async def test_policies_there_are_the_cnis(self) -> None:
        self.assertIsInstance(await failed(self.uplink.set_firewall(self.vm, CLOSED)), FailedPrecondition)

    async def test_the_kernel_is_tried_where_there_will_be_such_vms(self) -> None:
        await self.uplink.prepare()
        self.patch(namespaces, "_thd_comes_back", lambda tap: False)
        self.assertIsInstance(await failed(self.uplink.prepare()), FailedPrecondition)
        await uplink(False).prepare()

    async def test_a_vm_on_the_bridge_has_what_was_reserved(self) -> None:
        vm = vm_of(VmRecord(TOKEN, "s", "c", "n", "10.88.0.9", 0.0))
        self.assertEqual(await self.uplink.addresses(vm), ["10.88.0.9"])
        self.assertIn(
            "NetworkPolicies are turned off", str(await failed(self.uplink.set_firewall(vm, CLOSED)))
        )


class RecordTests(SynchronousTestCase):
    def test_a_restarted_daemon_knows_which_vms_are_on_the_bridge(self) -> None:
        directory = Path(self.mktemp())
        overlay = Path(self.mktemp())
        overlay.write_text("")
        records = VmRecords(directory)
        records.open()
        there = VmRecord(
            TOKEN, "s", "c", "n", "10.4.0.7", 0.0, os.getuid(),
            attachment=Attachment(Path("/run/netns/x"), "eth1"), more_addresses=("fd00:4::7",),
        )  # fmt: skip
        records.add(there, overlay)
        here = VmRecord("f" * 32, "s", "c", "n", "10.88.0.9", 0.0, os.getuid())
        records.add(here, overlay)
        self.assertEqual([(each, each.on_bridge) for each in records.read()], [(there, False), (here, True)])


def for_images(records: VmRecords, parts: Parts) -> tuple[ImageLaunches, Hypervisors]:
    """Return what a launcher needs for VMs that boot images."""
    return (
        ImageLaunches(reactor, QemuSettings(), records, parts, COMMAND_LINE),
        Hypervisors(
            reactor,
            records,
            lambda record: "",
            parts.uplink.guest_network,
            parts.uplink.has_address,
            1 << 20,
        ),
    )


class ValidateTests(SynchronousTestCase):
    """What is refused before anything is created."""

    def test_what_annotations_ask_for_is_checked(self) -> None:
        parts = make_parts(
            reactor, QemuSettings(), ProviderContext(Path("/nowhere"), Path("/nowhere"), "c", "n"), PATHS
        )
        records = VmRecords(Path("/nowhere"))
        launcher = Launcher(
            reactor, QemuSettings(), records, parts, ME, PATHS,
            lambda vm: None, lambda vm: self.fail("no VM"), *for_images(records, parts), Disks(reactor), UIDS,
            SharedRam(reactor),
        )  # fmt: skip
        spec = InstanceSpec(TOKEN, "s", "c", "n", cast(Identity, None))
        image = GuestImage(Path("/images/one"), "key", 0.0, "bookworm", "6.1", ())
        template = Template(Path("/nowhere"), COMMAND_LINE, image)
        self.successResultOf(start(launcher.validate(spec, template)))
        for asked in ({"infranetes.io/disk": "1"}, {"infranetes.io/gpus": "1"}):
            refused = attrs.evolve(spec, request=VmRequest(annotations=asked))
            self.failureResultOf(start(launcher.validate(refused, template)), InvalidArgument)


class TornDownTests(TestCase):
    """A VM whose process has ended."""

    async def test_all_that_belongs_to_it_goes_and_its_console_is_kept(self) -> None:
        root = Path(self.mktemp()).absolute()
        paths = ProviderPaths(root / "state", root / "run")
        (root / "run").mkdir(parents=True)
        (root / "overlay").write_text("")
        records = VmRecords(paths.vms)
        records.open()
        done: list[str] = []

        class Places(Placement):
            async def forget(self, record: VmRecord) -> None:
                done.append(f"forgotten {record.id}")

        class Leaves(UplinkOfRecord):
            async def leave(self, vm: Vm) -> None:
                done.append(f"left {vm.record.id}")

        context = ProviderContext(root / "state", root / "run", "c", "n")
        parts = make_parts(reactor, QemuSettings(), context, paths)
        made = parts.uplink
        leaves = Leaves(made._bridge, made._namespaces, made._dhcp)
        parts = attrs.evolve(parts, placement=Places(reactor), uplink=leaves)
        launcher = Launcher(
            reactor, QemuSettings(), records, parts, ME, paths,
            lambda vm: None, lambda vm: self.fail("no VM"), *for_images(records, parts), Disks(reactor), UIDS,
            SharedRam(reactor),
        )  # fmt: skip
        for keeps in (True, False):
            record = VmRecord(TOKEN, "sandbox", "c", "n", "10.88.0.9", 0.0, phase=Phase.READY)
            records.add(attrs.evolve(record, uid=os.getuid()), root / "overlay")
            vm = Vm(record, paths.of_vm(record, ME))
            vm.paths.console.write_text("Kernel panic")
            vm.paths.sockets.mkdir()
            connections = vm.connections = VmConnections(reactor)
            if not keeps:
                self.patch(parts.consoles, "add", self.full)
            with capturedLogs() as events:
                for _ in range(2):
                    await launcher.tear_down(vm)
            self.assertEqual(done, 2 * [f"forgotten {record.id}", f"left {record.id}"])
            done.clear()
            self.assertIsNone(vm.connections)
            self.assertTrue(connections.lost)
            self.assertEqual([*paths.vms.iterdir(), *paths.run.iterdir()], [])
            [kept] = parts.consoles.find("sandbox")
            self.assertEqual(kept.text, "Kernel panic")
            words = " ".join(formatEvent(event) or "" for event in events)
            self.assertEqual("can't be kept" in words and "No space left" in words, not keeps)

    def full(self, *_: object) -> None:
        raise OSError(28, "No space left on device")
