# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's parts that need neither VMs nor files: addresses, QMP, identity port, command line."""

from __future__ import annotations

import json
import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, cast

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import ProviderContext, Size
from infranetes.providers.qemu import (
    create,
    identity_port,
    subnet,
)
from infranetes.providers.qemu.command_line import SCSI, CommandLine
from infranetes.providers.qemu.identity_port import Failed, IdentityPort, Ready, Waiting
from infranetes.providers.qemu.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.qmp import (
    MAX_LINE,
    Answer,
    Greeting,
    QmpConnection,
    QmpCore,
    QmpError,
    QmpEvent,
)
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.sizes import Hotplug, disk_size, hotplug_for, memory_for_pod, needed_overhead
from infranetes_common.errors import (
    ConfigError,
    DeadlineExceeded,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from tests.support.peak import peak

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
SETTINGS = QemuSettings()
TOKEN = "0123456789abcdef" * 2


class SubnetTests(SynchronousTestCase):
    """The pods' subnet."""

    def test_kubelet_gives_one_or_two_families(self) -> None:
        for text in ("10.1.0.0/16", "10.1.0.0/16,fd00::/64", "fd00::/64, 10.1.0.0/16"):
            self.assertEqual(subnet.subnet(text), IPv4Network("10.1.0.0/16"))

    def test_what_can_not_serve_pods_is_refused(self) -> None:
        wrong = (
            "", "x", "10.0.0.1", "10.0.0.1/24", "10.0.0.0/31", "10.0.0.0/4", "fd00::/64", "127.0.0.0/8",
            "224.0.0.0/8", "169.254.0.0/16", "10.0.0.0/24,10.1.0.0/24", "10.0.0.0/24,",
        )  # fmt: skip
        for text in wrong:
            self.assertRaises(InvalidArgument, subnet.subnet, text)

    @given(st.integers(min_value=22, max_value=30), st.data())
    def test_no_address_is_given_twice_until_all_are_taken(self, prefix: int, data: Any) -> None:
        network = IPv4Network(("10.7.0.0", prefix))
        last = data.draw(st.sampled_from([None, IPv4Address("10.9.9.9"), *network]))
        taken: set[IPv4Address] = set()
        for _ in range(network.num_addresses - 3):
            last = subnet.free_address(network, taken, last)
            self.assertIn(last, network)
            self.assertNotIn(last, {*taken, network[0], network[-1], subnet.gateway(network)})
            taken.add(last)
        with self.assertRaises(ResourceExhausted) as caught:
            subnet.free_address(network, taken, last)
        self.assertIn(str(network), str(caught.exception))

    def test_an_address_given_back_rests_while_there_are_others(self) -> None:
        network = IPv4Network("10.7.0.0/24")
        first = subnet.free_address(network, set(), None)
        self.assertNotEqual(subnet.free_address(network, set(), first), first)

    def test_an_address_has_one_mac(self) -> None:
        self.assertEqual(subnet.mac_of(IPv4Address("10.88.1.255")), "0a:58:0a:58:01:ff")


class QmpCoreTests(SynchronousTestCase):
    """QMP without a transport."""

    @given(st.lists(st.integers(min_value=1, max_value=40), max_size=20))
    def test_messages_come_out_whole_however_they_are_cut(self, cuts: list[int]) -> None:
        wire = GREETING + b'{"return": {"a": 1}, "id": 1}\r\n{"event": "STOP", "timestamp": {}}\r\n'
        wire += b'{"error": {"class": "GenericError", "desc": "no"}, "id": 2}\r\n'
        core = QmpCore()
        found: list[Any] = []
        for cut in cuts:
            found += core.receive(wire[:cut])
            wire = wire[cut:]
        found += core.receive(wire)
        expected = [Greeting(), Answer(1, {"a": 1}), QmpEvent("STOP", {}), Answer(2, error="no")]
        self.assertEqual(found, expected)

    def test_nonsense_is_refused(self) -> None:
        self.assertRaises(ValueError, QmpCore().receive, b"hello\n")
        self.assertRaises(ValueError, QmpCore().receive, b"[1]\n")
        self.assertRaises(ValueError, QmpCore().receive, b"x" * MAX_LINE + b"yy")

    def test_an_answer_of_many_small_values_takes_no_memory(self) -> None:
        answer = b'{"id": 1, "return": [' + b"{}," * (MAX_LINE // 3 - 20) + b"{}]}\n"
        self.assertLess(peak(lambda: self.assertRaises(ValueError, QmpCore().receive, answer)), 8 * MIB)


class QmpTests(SynchronousTestCase):
    """A monitor connection."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.events: list[QmpEvent] = []
        self.lost = 0
        self.qmp = QmpConnection(self.clock, self.events.append, self.on_lost)
        self.transport = StringTransport()
        self.qmp.makeConnection(self.transport)

    def on_lost(self) -> None:
        self.lost += 1

    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.transport.value().splitlines()]

    def test_a_command_waits_for_the_greeting_and_follows_the_negotiation(self) -> None:
        self.qmp.execute("query-status")
        self.assertEqual(self.sent(), [])
        self.qmp.dataReceived(GREETING)
        self.assertEqual([each["execute"] for each in self.sent()], ["qmp_capabilities", "query-status"])

    def test_answers_find_their_commands(self) -> None:
        self.qmp.dataReceived(GREETING)
        first = self.qmp.execute("one")
        second = self.qmp.execute("two", socket_id=0)
        numbers = [each["id"] for each in self.sent()[1:]]
        self.assertEqual(self.sent()[2]["arguments"], {"socket-id": 0})
        self.qmp.dataReceived(json.dumps({"return": 2, "id": numbers[1]}).encode() + b"\n")
        refusal = {"error": {"class": "X", "desc": "bad one"}, "id": numbers[0]}
        self.qmp.dataReceived(json.dumps(refusal).encode() + b"\n")
        self.assertEqual(self.successResultOf(second), 2)
        self.assertIn("bad one", str(self.failureResultOf(first, QmpError).value))

    def test_a_command_without_answer_fails_in_time(self) -> None:
        waiting = self.qmp.execute("query-status", 3.0)
        self.clock.advance(3.1)
        self.failureResultOf(waiting, DeadlineExceeded)
        self.qmp.dataReceived(GREETING)

    def test_when_qemu_goes_all_that_waits_fails(self) -> None:
        self.qmp.dataReceived(GREETING)
        waiting = self.qmp.execute("cont")
        self.qmp.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(waiting, Unavailable)
        self.failureResultOf(self.qmp.execute("cont"), Unavailable)
        self.assertEqual(self.lost, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_events_are_told_and_nonsense_ends_the_connection(self) -> None:
        self.qmp.dataReceived(GREETING + b'{"event": "SHUTDOWN", "data": {"reason": "guest-panic"}}\n')
        self.assertEqual(self.events, [QmpEvent("SHUTDOWN", {"reason": "guest-panic"})])
        self.qmp.dataReceived(b"\xff\n")
        self.assertTrue(self.transport.disconnected)


class IdentityPortTests(SynchronousTestCase):
    """The agent's port."""

    def test_lines(self) -> None:
        for line, said in (
            (b"waiting", Waiting()),
            (b"ready 2475\r", Ready(2475)),
            (b"failed no such card", Failed("no such card")),
            (b"failed", Failed("no reason given")),
            (b"ready 0", None),
            (b"ready 65536", None),
            (b"ready 99999999999999999999", None),
            (b"ready x", None),
            (b"ready 2475junk", None),
            (b"ready 2475 1", None),
            (b"ready 000024750000", None),
            ("ready \u0662\u0664\u0667\u0665".encode(), None),
            (b"ready " + b"1" * 4000, None),
            (b"", None),
            (b"\xff\xfe", None),
        ):
            self.assertEqual(identity_port.parse(line), said)

    def connected(self) -> IdentityPort:
        port = IdentityPort()
        port.makeConnection(StringTransport())
        return port

    def test_stale_lines_before_the_answer_do_no_harm(self) -> None:
        port = self.connected()
        for piece in (b"ting\nwaiting\n", b"waiting\nready 24", b"75\nready 1\n"):
            port.dataReceived(piece)
        self.successResultOf(port.waiting.wait())
        self.assertEqual(self.successResultOf(port.ready.wait()), 2475)

    def test_a_refusal_has_the_agents_words(self) -> None:
        port = self.connected()
        port.dataReceived(b"failed the clock can't be set\n")
        self.assertIn(
            "the clock can't be set", str(self.failureResultOf(port.ready.wait(), InfranetesError).value)
        )

    def test_endless_noise_takes_no_memory(self) -> None:
        port = self.connected()
        for _ in range(100):
            port.dataReceived(b"x" * 10000)
        self.assertLess(len(port._buffer), 20000)
        port.dataReceived(b"\nready 2475\n")
        self.assertEqual(self.successResultOf(port.ready.wait()), 2475)

    def test_an_end_without_answer_is_told(self) -> None:
        port = self.connected()
        port.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(port.ready.wait(), Unavailable)


class CommandLineTests(SynchronousTestCase):
    """QEMU's command line."""

    def test_it_runs_without_any_right(self) -> None:
        command = unprivileged(["qemu"], QemuUser(7, 8, [9]), dies_with_parent=False)
        for word in ("--reuid=7", "--regid=8", "--groups=9", "--no-new-privs", "--bounding-set=-all"):
            self.assertIn(word, command)
        self.assertNotIn("--pdeathsig=KILL", command)
        self.assertIn("--pdeathsig=KILL", unprivileged(["qemu"], QemuUser(7, 8), dies_with_parent=True))
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            denied = arguments[arguments.index("-sandbox") + 1]
            for what in ("elevateprivileges", "spawn", "resourcecontrol", "obsolete"):
                self.assertIn(f"{what}=deny", denied)

    def test_it_opens_nothing_but_what_it_is_handed(self) -> None:
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            for path in re.findall(r"/[a-z]+/[^,\s]*", " ".join(arguments)):
                self.assertTrue(re.fullmatch(r"/proc/self/fd/\d+|/dev/vda", path), path)

    def test_template_and_clone_differ_in_memory_disk_and_start_alone(self) -> None:
        def plain(arguments: list[str]) -> list[str]:
            words = [each.replace("share=on", "").replace("share=off", "") for each in arguments]
            return [each for each in words if not each.startswith("driver=qcow2")]

        clone = plain(COMMAND_LINE.clone_arguments())
        template = plain(COMMAND_LINE.template_arguments())
        self.assertEqual(clone[-2:], ["-incoming", "defer"])
        boot = template.index("-kernel")
        self.assertEqual(clone[:-2], template[:boot])
        self.assertEqual(template[boot::2], ["-kernel", "-initrd", "-append"])

    def test_only_a_processor_that_speculates_is_guarded_against_it(self) -> None:
        self.assertIn("mitigations=off", COMMAND_LINE.kernel_arguments())
        kvm = attrs.evolve(COMMAND_LINE, accelerator="kvm")
        self.assertNotIn("mitigations", kvm.kernel_arguments())

    def test_a_disk_is_no_smaller_than_the_templates_and_no_larger_than_is_allowed(self) -> None:
        least = COMMAND_LINE.disk_mib * MIB
        for most in (0, 2 * least):
            self.assertEqual(disk_size(COMMAND_LINE, 0, most), least)
            self.assertEqual(disk_size(COMMAND_LINE, least, most), least)
            for refused in (least - 1, max(least, most) + 1):
                self.assertRaises(InvalidArgument, disk_size, COMMAND_LINE, refused, most)
        self.assertEqual(disk_size(COMMAND_LINE, 2 * least, 2 * least), 2 * least)

    def test_what_can_not_be_more_has_no_room_for_more(self) -> None:
        for most, cpus, memory, processors in (
            (1024, 1, "size=1024M", "cpus=1"),
            (2048, 2, "size=1024M,slots=", "cpus=1,maxcpus=2,"),
        ):
            line = attrs.evolve(COMMAND_LINE, max_memory_mib=most, max_cpus=cpus)
            for arguments in (line.template_arguments(), line.clone_arguments()):
                found = [arguments[arguments.index(each) + 1] for each in ("-m", "-smp")]
                self.assertTrue(found[0].startswith(memory), found)
                self.assertEqual("slots" in found[0], most > 1024)
                self.assertTrue(found[1].startswith(processors), found)
                self.assertEqual("maxcpus" in found[1], cpus > 1)

    def test_translated_code_is_bounded_where_code_is_translated(self) -> None:
        for accelerator, expected in (("tcg", f"tcg,tb-size={COMMAND_LINE.code_mib}"), ("kvm", "kvm")):
            arguments = attrs.evolve(COMMAND_LINE, accelerator=accelerator).clone_arguments()
            self.assertEqual(arguments[arguments.index("-accel") + 1], expected)

    def test_an_emulated_processor_has_no_fast_copies_with_which_no_guest_boots_in_qemu_10(self) -> None:
        arguments = COMMAND_LINE.template_arguments()
        self.assertLessEqual({"-erms", "-fsrm"}, {*arguments[arguments.index("-cpu") + 1].split(",")})

    def test_disks_can_be_shown_by_a_controller_that_was_there_from_the_start(self) -> None:
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            self.assertIn(f"virtio-scsi-pci,id={SCSI},num_queues=2,hotplug=off", arguments)

    def test_nothing_of_a_vms_own_disk_waits_for_the_medium_nor_takes_room_for_zeros(self) -> None:
        """It is deleted with the VM. A disk that is full on the node does not halt the VM."""
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            options = {*arguments[arguments.index("-blockdev") + 1].split(",")}
            self.assertLessEqual({"cache.no-flush=on", "discard=unmap", "detect-zeroes=unmap"}, options)
            device = {*next(each for each in arguments if each.startswith("virtio-blk-pci")).split(",")}
            self.assertLessEqual({"werror=report", "rerror=report"}, device)

    def test_images_are_one_more_disk_which_nobody_writes(self) -> None:
        with_images = attrs.evolve(COMMAND_LINE, preload="key")
        for plain, more in (
            (COMMAND_LINE.template_arguments(), with_images.template_arguments()),
            (COMMAND_LINE.clone_arguments(), with_images.clone_arguments()),
        ):
            added = [word for word in more if word not in plain]
            self.assertEqual([word for word in plain if word not in more], [])
            self.assertIn("read-only=on", added[0])
            self.assertIn("serial=infranetes-images", added[1])

    def test_the_template_depends_on_image_and_command_line(self) -> None:
        inputs = COMMAND_LINE.template_inputs("image")
        self.assertNotEqual(inputs, COMMAND_LINE.template_inputs("other"))
        for change in (
            {"version": "8"},
            {"memory_mib": 512},
            {"accelerator": "kvm"},
            {"max_cpus": 2},
            {"preload": "k"},
        ):
            self.assertNotEqual(inputs, attrs.evolve(COMMAND_LINE, **change).template_inputs("image"))

    def test_hotplugged_is_what_the_template_lacks(self) -> None:
        for size, expected in (
            (Size(), Hotplug(0, 0)),
            (Size(cpu_millis=1000, memory_bytes=768 * MIB), Hotplug(0, 0)),
            (Size(cpu_millis=1001, memory_bytes=769 * MIB), Hotplug(1, 128)),
            (Size(cpu_millis=64000, memory_bytes=2048 * MIB), Hotplug(3, 1280)),
        ):
            self.assertEqual(hotplug_for(COMMAND_LINE, size, SETTINGS), expected)

    def test_the_overhead_of_a_pod_is_counted_once(self) -> None:
        """The overhead covers the guest's own needs and QEMU's; the guest gets what exceeds that."""
        self.assertEqual(needed_overhead(COMMAND_LINE, SETTINGS), (256 + 64 + 64) * MIB)
        kvm = attrs.evolve(COMMAND_LINE, accelerator="kvm")
        self.assertEqual(needed_overhead(kvm, SETTINGS), (256 + 64) * MIB)
        for overhead, more in ((0, 256), (160, 256), (384, 256), (512, 384), (513, 512)):
            size = Size(memory_bytes=1024 * MIB, overhead_bytes=overhead * MIB)
            self.assertEqual(hotplug_for(COMMAND_LINE, size, SETTINGS), Hotplug(0, more), overhead)
        only = Size(overhead_bytes=4096 * MIB)
        self.assertEqual(hotplug_for(COMMAND_LINE, only, SETTINGS), Hotplug(0, 0))

    def test_huge_pages_are_beside_what_the_pod_asks_for_or_has_by_default(self) -> None:
        for memory, huge, more in (
            (0, 0, 0),
            (0, 100, 128),
            (256, 512, 0),
            (768, 100, 128),
            (1024, 512, 768),
        ):
            size = Size(memory_bytes=memory * MIB, huge_bytes=huge * MIB)
            found = hotplug_for(COMMAND_LINE, size, SETTINGS)
            self.assertEqual(found, Hotplug(0, more), (memory, huge))
            if memory and more:
                left = memory_for_pod(COMMAND_LINE, found, size, SETTINGS)
                self.assertEqual(left, (1024 + more - 256 - huge) * MIB)
        with self.assertRaises(InvalidArgument) as caught:
            hotplug_for(COMMAND_LINE, Size(huge_bytes=9000 * MIB), SETTINGS)
        self.assertIn("a pod of 9000 MiB needs a VM of 10024 MiB", str(caught.exception))
        self.assertRaises(InvalidArgument, hotplug_for, COMMAND_LINE, Size(huge_bytes=-1), SETTINGS)

    def test_memory_that_the_node_has_not_is_refused(self) -> None:
        hotplug_for(COMMAND_LINE, Size(memory_bytes=(8192 - 256) * MIB), SETTINGS)
        with self.assertRaises(InvalidArgument) as caught:
            hotplug_for(COMMAND_LINE, Size(memory_bytes=9000 * MIB), SETTINGS)
        self.assertIn("max_memory", str(caught.exception))
        self.assertRaises(InvalidArgument, hotplug_for, COMMAND_LINE, Size(memory_bytes=-1), SETTINGS)


class ConfigurationTests(SynchronousTestCase):
    """The table of the configuration."""

    def make(self, table: dict[str, Any], run_dir: str = "/run/x") -> QemuProvider:
        return create(cast(IReactor, Clock()), table, ProviderContext(Path("/x"), Path(run_dir), "c", "n"))

    def test_it_may_be_empty(self) -> None:
        self.assertEqual(self.make({}).name, "qemu")

    def test_what_is_wrong_is_named(self) -> None:
        for table in (
            {"pod_cidr": "10.0.0.1/8"},
            {"bridge": "br-0; rm"},
            {"accelerator": "hvf"},
            {"memory": "1MiB"},
            {"mtu": 5},
            {"no_such_key": 1},
            {"max_cpus": "4"},
        ):
            with self.assertRaises(ConfigError) as caught:
                self.make(table)
            [key] = table
            self.assertIn(f"providers.qemu.{key}", str(caught.exception))

    def test_a_run_dir_that_is_too_long_for_sockets_is_refused(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            self.make({}, "/run/" + "x" * 90)
        self.assertIn("run_dir", str(caught.exception))
