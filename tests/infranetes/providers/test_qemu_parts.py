"""The QEMU provider's parts that need no VM: addresses, QMP, the agent's port, command lines, records."""

from __future__ import annotations

import json
import os
import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest.image import GuestImage
from infranetes.providers.interface import ProviderContext, Size
from infranetes.providers.qemu import create, ground, identity_port, machine, record, subnet
from infranetes.providers.qemu.descriptors import Descriptors
from infranetes.providers.qemu.identity_port import Failed, IdentityPort, Ready, Waiting
from infranetes.providers.qemu.machine import Growth, Machine, growth
from infranetes.providers.qemu.qmp import Answer, Event, Greeting, Qmp, QmpCore, QmpError
from infranetes.providers.qemu.record import Phase, Record, Records
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.template import PARTS, Template, seal
from infranetes.providers.qemu.vm import Paths
from infranetes_common.errors import (
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
MACHINE = Machine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
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
        expected = [Greeting(), Answer(1, {"a": 1}), Event("STOP", {}), Answer(2, error="no")]
        self.assertEqual(found, expected)

    def test_nonsense_is_refused(self) -> None:
        self.assertRaises(ValueError, QmpCore().receive, b"hello\n")
        self.assertRaises(ValueError, QmpCore().receive, b"[1]\n")
        self.assertRaises(ValueError, QmpCore().receive, b"x" * (4 << 20) + b"yy")


class QmpTests(SynchronousTestCase):
    """A monitor connection."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.lost = 0
        self.qmp = Qmp(self.clock, self.events.append, self.on_lost)
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
        self.assertEqual(self.events, [Event("SHUTDOWN", {"reason": "guest-panic"})])
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


class MachineTests(SynchronousTestCase):
    """QEMU's command line."""

    def test_it_runs_without_any_right(self) -> None:
        command = machine.unprivileged(["qemu"], 7, 8, [9], tied=False)
        for word in ("--reuid=7", "--regid=8", "--groups=9", "--no-new-privs", "--bounding-set=-all"):
            self.assertIn(word, command)
        self.assertNotIn("--pdeathsig=KILL", command)
        self.assertIn("--pdeathsig=KILL", machine.unprivileged(["qemu"], 7, 8, [], tied=True))
        for arguments in (MACHINE.template(), MACHINE.copy()):
            denied = arguments[arguments.index("-sandbox") + 1]
            for what in ("elevateprivileges", "spawn", "resourcecontrol", "obsolete"):
                self.assertIn(f"{what}=deny", denied)

    def test_it_opens_nothing_but_what_it_is_handed(self) -> None:
        for arguments in (MACHINE.template(), MACHINE.copy()):
            for path in re.findall(r"/[a-z]+/[^,\s]*", " ".join(arguments)):
                self.assertTrue(re.fullmatch(r"/proc/self/fd/\d+|/dev/vda", path), path)

    def test_template_and_copy_differ_in_memory_disk_and_start_alone(self) -> None:
        def plain(arguments: list[str]) -> list[str]:
            words = [each.replace("share=on", "").replace("share=off", "") for each in arguments]
            return [each for each in words if not each.startswith("driver=qcow2")]

        copy = plain(MACHINE.copy())
        self.assertEqual(copy[-2:], ["-incoming", "defer"])
        self.assertEqual(copy[:-2], plain(MACHINE.template()))

    def test_images_are_one_more_disk_which_nobody_writes(self) -> None:
        with_images = attrs.evolve(MACHINE, preload="key")
        for plain, more in (
            (MACHINE.template(), with_images.template()),
            (MACHINE.copy(), with_images.copy()),
        ):
            added = [word for word in more if word not in plain]
            self.assertEqual([word for word in plain if word not in more], [])
            self.assertIn("read-only=on", added[0])
            self.assertIn("serial=infranetes-images", added[1])

    def test_the_template_depends_on_image_and_machine(self) -> None:
        inputs = machine.inputs(MACHINE, "image")
        self.assertNotEqual(inputs, machine.inputs(MACHINE, "other"))
        for change in (
            {"version": "8"},
            {"memory_mib": 512},
            {"accelerator": "kvm"},
            {"max_cpus": 2},
            {"preload": "k"},
        ):
            self.assertNotEqual(inputs, machine.inputs(attrs.evolve(MACHINE, **change), "image"))

    def test_growth_is_what_the_template_lacks(self) -> None:
        for size, expected in (
            (Size(), Growth(0, 0)),
            (Size(cpu_millis=1000, memory_bytes=768 * MIB), Growth(0, 0)),
            (Size(cpu_millis=1001, memory_bytes=769 * MIB), Growth(1, 128)),
            (Size(cpu_millis=64000, memory_bytes=2048 * MIB), Growth(3, 1280)),
        ):
            self.assertEqual(growth(MACHINE, size, 256), expected)

    def test_memory_that_the_node_has_not_is_refused(self) -> None:
        growth(MACHINE, Size(memory_bytes=(8192 - 256) * MIB), 256)
        with self.assertRaises(InvalidArgument) as caught:
            growth(MACHINE, Size(memory_bytes=9000 * MIB), 256)
        self.assertIn("max_memory", str(caught.exception))
        self.assertRaises(InvalidArgument, growth, MACHINE, Size(memory_bytes=-1), 256)


class RecordTests(SynchronousTestCase):
    """VMs' directories."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.records = Records(self.directory)
        self.overlay = Path(self.mktemp())
        self.overlay.write_bytes(b"disk")
        self.assertEqual(self.records.open(), [])
        self.record = Record(TOKEN, "sandbox", "c", "n", "10.7.0.2", 12.5)

    def add(self) -> None:
        self.records.add(self.record, self.overlay, (os.getuid(), os.getgid()))

    def test_what_is_added_is_found_as_it_was_last_updated(self) -> None:
        self.add()
        ready = attrs.evolve(self.record, phase=Phase.READY, agent_port=2475, detail="fine")
        self.records.update(ready)
        self.assertEqual(Records(self.directory).open(), [ready])
        self.assertEqual((self.records.of(TOKEN) / record.DISK).read_bytes(), b"disk")

    def test_a_record_appears_whole_or_not_at_all(self) -> None:
        self.overlay.unlink()
        self.assertRaises(FileNotFoundError, self.add)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_what_a_killed_daemon_left_half_done_is_swept_away(self) -> None:
        (self.directory / f".new-{TOKEN}").mkdir()
        self.add()
        gone = self.records.hide(TOKEN)
        self.assertTrue(gone.exists())
        self.assertEqual(self.records.read(), [])
        self.assertEqual(self.records.open(), [])
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_a_record_that_can_not_be_read_stays_visible(self) -> None:
        self.add()
        for content in ("", "{", "[]", '{"phase": "x"}', '{"token": 5}'):
            (self.records.of(TOKEN) / record.RECORD).write_text(content)
            [found] = self.records.open()
            self.assertEqual((found.token, found.phase), (TOKEN, Phase.FAILED))
            self.assertIn("can't be read", found.detail)
        self.flushLoggedErrors()

    def test_ids_are_ours_alone(self) -> None:
        self.assertEqual(record.token_of(self.record.id), TOKEN)
        for odd in ("", "qemu-", TOKEN, f"qemu-{TOKEN}\n", f"qemu-{TOKEN[:-1]}", "../../etc", "ü" * 300):
            self.assertIsNone(record.token_of(odd))

    def test_a_consoles_end_is_plain_text(self) -> None:
        console = Path(self.mktemp())
        self.assertEqual(record.tail(console), "")
        console.write_bytes(b"x" * 5000 + b"\n\x1b[0;1;31mFailed\x1b[0m to start\x00\xff\r\n")
        self.assertTrue(record.tail(console).endswith("\nFailed to start\ufffd"))

    def test_a_console_keeps_its_end_under_a_bound(self) -> None:
        console = Path(self.mktemp())
        with console.open("ab", buffering=0) as writer:
            writer.write(b"a" * 900)
            record.trim(console, 1000)
            self.assertEqual(console.stat().st_size, 900)
            writer.write(b"b" * 500)
            record.trim(console, 1000)
            writer.write(b"c" * 10)
        self.assertEqual(console.read_bytes(), b"b" * 500 + b"c" * 10)


class TemplateTests(SynchronousTestCase):
    """Whether a template on disk may be used."""

    def setUp(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        image = GuestImage(root / "image", "key", 0.0, "bookworm", "6.1", ())
        self.template = Template(root / "template", MACHINE, image)
        for part in (image.disk, image.kernel, image.initrd, *map(self.template.directory.joinpath, PARTS)):
            part.parent.mkdir(exist_ok=True)
            part.write_text("content")
        seal(self.template.directory, self.template)

    def test_as_it_was_made(self) -> None:
        self.assertTrue(self.template.whole())
        with Descriptors() as descriptors:
            self.template.open(descriptors)
            self.assertTrue(self.template.whole(), "use does not change it")

    def test_whatever_is_touched_or_missing_makes_it_unusable(self) -> None:
        for part in (*PARTS, "manifest.json"):
            path = self.template.directory / part
            path.unlink()
            self.assertFalse(self.template.whole(), part)
            path.write_text("content")
            self.assertFalse(self.template.whole(), part)
            seal(self.template.directory, self.template)
            self.assertTrue(self.template.whole())
        for path in (self.template.image.disk, self.template.directory / "ram"):
            with path.open("r+b") as file:
                file.write(b"C")
            self.assertFalse(self.template.whole(), str(path))
            seal(self.template.directory, self.template)

    def test_its_images_belong_to_it(self) -> None:
        template = attrs.evolve(self.template, machine=attrs.evolve(MACHINE, preload="key"))
        self.assertFalse(template.whole())
        (template.directory / "images").write_text("content")
        seal(template.directory, template)
        self.assertTrue(template.whole())
        with Descriptors() as descriptors:
            template.open(descriptors)
            self.assertIn(machine.Fd.IMAGES, descriptors.by_number())
        (template.directory / "images").unlink()
        self.assertFalse(template.whole())

    def test_its_ram_is_for_qemus_group_alone_and_nothing_else_can_be_written(self) -> None:
        modes = {part: (self.template.directory / part).stat().st_mode & 0o777 for part in PARTS}
        self.assertEqual(modes.pop("ram"), 0o660)
        self.assertEqual(set(modes.values()), {0o644})


class GroundTests(SynchronousTestCase):
    """What the provider stands on."""

    def test_a_user_that_is_not_there_is_named_with_the_way_to_make_it(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            ground.qemu_user("no-such-user")
        self.assertIn("useradd --system", str(caught.exception))

    def test_one_daemon_at_a_time(self) -> None:
        paths = Paths(Path(self.mktemp()), Path(self.mktemp()))
        paths.state.mkdir()
        held = ground.take_lock(paths)
        self.assertRaises(FailedPrecondition, ground.take_lock, paths)
        os.close(held)
        os.close(ground.take_lock(paths))

    def test_the_subnet_of_update_runtime_config_outlives_the_daemon_but_not_the_configuration(self) -> None:
        path = Path(self.mktemp()) / "network.json"
        self.assertEqual(ground.kept_network(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))
        ground.keep_network(path, "10.1.0.0/16", IPv4Network("10.2.0.0/24"))
        self.assertEqual(ground.kept_network(path, "10.1.0.0/16"), IPv4Network("10.2.0.0/24"))
        self.assertEqual(ground.kept_network(path, "10.3.0.0/16"), IPv4Network("10.3.0.0/16"))
        path.write_text("[")
        self.assertEqual(ground.kept_network(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))

    def test_a_full_disk_is_told_as_one(self) -> None:
        error = ground.as_ours(OSError(28, "No space left on device", "/x/disk.qcow2"))
        self.assertIsInstance(error, ResourceExhausted)
        self.assertIn("/x/disk.qcow2", str(error))


class ConfigurationTests(SynchronousTestCase):
    """The table of the configuration."""

    def make(self, table: dict[str, Any], run_dir: str = "/run/x") -> Any:
        return create(Clock(), table, ProviderContext(Path("/x"), Path(run_dir), "c", "n"))

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
