# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's files: VMs' records and consoles, templates, the lock and the saved subnet."""

from __future__ import annotations

import contextlib
import os
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import reporting
from infranetes.guest.image import GuestImage, NoGuestImage
from infranetes.providers.interface import Awaited, Instance, InstanceState
from infranetes.providers.qemu import consoles, host_checks, record
from infranetes.providers.qemu.command_line import CommandLine, Fd
from infranetes.providers.qemu.connections import VmConnections
from infranetes.providers.qemu.find import remove_other_sockets
from infranetes.providers.qemu.kvm import qemu_user
from infranetes.providers.qemu.open_files import OpenFiles
from infranetes.providers.qemu.os_errors import as_infranetes_error
from infranetes.providers.qemu.paths import ProviderPaths
from infranetes.providers.qemu.pod_network import load_subnet, save_firewall, save_subnet
from infranetes.providers.qemu.privileges import QemuUser
from infranetes.providers.qemu.record import Phase, VmRecord, VmRecords
from infranetes.providers.qemu.template import PARTS, Template, last_used
from infranetes.providers.qemu.vm import Vm, on_bridge
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.pod_firewall import CLOSED
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root

COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
TOKEN = "0123456789abcdef" * 2


class RecordTests(SynchronousTestCase):
    """VMs' directories."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.records = VmRecords(self.directory)
        self.overlay = Path(self.mktemp())
        self.overlay.write_bytes(b"disk")
        self.assertEqual(self.records.open(), [])
        self.record = VmRecord(TOKEN, "sandbox", "c", "n", "10.7.0.2", 12.5, os.getuid())

    def add(self) -> None:
        self.records.add(self.record, self.overlay)

    def test_what_is_added_is_found_as_it_was_last_updated(self) -> None:
        self.add()
        ready = attrs.evolve(self.record, phase=Phase.READY, agent_port=2475, detail="fine")
        self.records.update(ready)
        self.assertEqual(VmRecords(self.directory).open(), [ready])
        self.assertEqual((self.records.directory_of(TOKEN) / record.DISK).read_bytes(), b"disk")

    def test_a_record_appears_whole_or_not_at_all(self) -> None:
        self.overlay.unlink()
        self.assertRaises(FileNotFoundError, self.add)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_what_can_not_be_swept_away_stops_nobody(self) -> None:
        """Such as a file where a directory was to be."""
        (self.directory / f".gone-{TOKEN}").write_text("")
        self.add()
        self.assertEqual(self.records.open(), [self.record])

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
            (self.records.directory_of(TOKEN) / record.RECORD).write_text(content)
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
        self.assertEqual(consoles.tail(console), "")
        console.write_bytes(b"x" * 5000 + b"\n\x1b[0;1;31mFailed\x1b[0m to start\x00\xff\r\n")
        self.assertTrue(consoles.tail(console).endswith("\nFailed to start\ufffd"))

    def test_a_console_keeps_its_end_under_a_bound(self) -> None:
        console = Path(self.mktemp())
        with console.open("ab", buffering=0) as writer:
            writer.write(b"a" * 900)
            consoles.trim(console, 1000)
            self.assertEqual(console.stat().st_size, 900)
            writer.write(b"b" * 500)
            consoles.trim(console, 1000)
            writer.write(b"c" * 10)
        self.assertEqual(console.read_bytes(), b"b" * 500 + b"c" * 10)


@needs_root
class VmTests(SynchronousTestCase):
    """The instance, as the provider's callers get it, of a VM."""

    def vm(self, **fields: Any) -> Vm:
        record = attrs.evolve(VmRecord(TOKEN, "sandbox", "c", "n", "10.7.0.2", 12.5), **fields)
        return Vm(record, ProviderPaths(Path("/x"), Path("/x")).of_vm(record, QemuUser(0, 0)))

    def test_it_is_told_as_it_was_recorded(self) -> None:
        vm = self.vm(phase=Phase.FAILED, detail="no luck", agent_port=4242, more_addresses=("fd00::7",))
        self.assertEqual(
            vm.instance(),
            Instance(
                f"qemu-{TOKEN}",
                TOKEN,
                "sandbox",
                InstanceState.ENDED,
                address="10.7.0.2",
                more_addresses=("fd00::7",),
                agent_host="10.7.0.2",
                agent_port=4242,
                created_at=12.5,
                detail="no luck",
            ),
        )

    def test_why_one_has_ended_is_what_qemu_says_or_else_its_process(self) -> None:
        vm = self.vm()
        self.assertEqual(vm.explain_end(), "its process ended")
        connections = vm.connections = VmConnections(installed())
        for reason, words in (
            ("", "its process ended"),
            ("guest-panic", "the guest's kernel panicked"),
            ("guest-shutdown", "the guest shut down"),
            ("subsystem-reset", "QEMU says subsystem-reset"),
        ):
            connections.shutdown_reason = reason
            self.assertEqual(vm.explain_end(), words)

    def test_the_end_of_its_console_is_quoted_if_there_is_any(self) -> None:
        root = Path(self.mktemp())
        vm = self.vm(phase=Phase.FAILED, detail="no luck")
        vm.paths = ProviderPaths(root, root).of_vm(vm.record, QemuUser(0, 0))
        self.assertEqual(str(vm.ended_error()), f"VM {vm.record.id} has ended: no luck")
        vm.paths.directory.mkdir(parents=True)
        vm.paths.console.write_text("Kernel panic")
        self.assertTrue(str(vm.ended_error()).endswith("no luck; the end of its console:\nKernel panic"))

    def test_those_on_the_bridge_are_those_that_run_or_are_being_made(self) -> None:
        made, ended, elsewhere = self.vm(), self.vm(phase=Phase.READY), self.vm(namespace="/run/netns/x")
        made.launching = elsewhere.launching = True
        self.assertEqual(on_bridge([made, ended, elsewhere]), [made])
        self.assertEqual([made.state, ended.state], [InstanceState.PENDING, InstanceState.ENDED])


@needs_root
class TemplateTests(SynchronousTestCase):
    """Whether a template on disk can be used."""

    def setUp(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        image = GuestImage(root / "image", "key", 0.0, "bookworm", "6.1", ())
        self.template = Template(root / "template", COMMAND_LINE, image)
        for part in (image.disk, image.kernel, image.initrd, *map(self.template.directory.joinpath, PARTS)):
            part.parent.mkdir(exist_ok=True)
            part.write_text("content")
        self.template.seal(self.template.directory)

    def test_as_it_was_made(self) -> None:
        self.assertTrue(self.template.intact())
        with contextlib.closing(OpenFiles()) as files:
            self.template.open_for_clone(files)
            self.assertTrue(self.template.intact(), "use does not change it")

    def test_whatever_is_touched_or_missing_makes_it_unusable(self) -> None:
        for part in (*PARTS, "manifest.json"):
            path = self.template.directory / part
            path.unlink()
            self.assertFalse(self.template.intact(), part)
            path.write_text("content")
            self.assertFalse(self.template.intact(), part)
            self.template.seal(self.template.directory)
            self.assertTrue(self.template.intact())
        for path in (self.template.image.disk, self.template.directory / "ram"):
            with path.open("r+b") as file:
                file.write(b"C")
            self.assertFalse(self.template.intact(), str(path))
            self.template.seal(self.template.directory)

    def test_when_it_was_used_last_is_known(self) -> None:
        self.assertEqual(last_used(self.template.directory), 0.0, "never")
        self.template.mark_used()
        os.utime(self.template.directory / "used", (1000.0, 1000.0))
        self.assertEqual(last_used(self.template.directory), 1000.0)
        self.template.mark_used()
        self.assertGreater(last_used(self.template.directory), 1000.0)

    def test_no_file_of_it_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        self.template.seal(self.template.directory)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_its_images_belong_to_it(self) -> None:
        template = attrs.evolve(self.template, command_line=attrs.evolve(COMMAND_LINE, preload="key"))
        self.assertFalse(template.intact())
        (template.directory / "images").write_text("content")
        template.seal(template.directory)
        self.assertTrue(template.intact())
        with contextlib.closing(OpenFiles()) as files:
            template.open_for_clone(files)
            self.assertIn(Fd.IMAGES, files.by_number())
        (template.directory / "images").unlink()
        self.assertFalse(template.intact())

    def test_its_ram_is_for_the_daemon_alone_and_nothing_else_can_be_written(self) -> None:
        modes = {part: (self.template.directory / part).stat().st_mode & 0o777 for part in PARTS}
        self.assertEqual(modes.pop("ram"), 0o600)
        self.assertEqual(set(modes.values()), {0o644})


class OpenFilesTests(SynchronousTestCase):
    """The descriptors that QEMU is handed."""

    def open_files(self) -> set[str]:
        return {*os.listdir("/proc/self/fd")}

    def test_all_are_closed_in_the_end_though_one_is_closed_already(self) -> None:
        path = Path(self.mktemp())
        path.mkdir()
        before = self.open_files()
        with contextlib.closing(OpenFiles()) as files:
            files.listen(Fd.QMP, path / "qmp")
            files.open(Fd.CONSOLE, path / "console", os.O_RDWR | os.O_CREAT)
            files.open(Fd.KERNEL, path / "console")
            files.set_standard_streams(path / "output")
            handed = files.by_number()
            self.assertEqual({*handed}, {0, 1, 2, Fd.QMP, Fd.CONSOLE, Fd.KERNEL})
            self.assertEqual(len(self.open_files() - before), len(handed))
            os.close(handed[Fd.KERNEL])
        self.assertEqual(self.open_files(), before)
        self.assertEqual(files.by_number(), {})


class HostTests(SynchronousTestCase):
    """What the provider requires of its host."""

    def test_sockets_of_vms_that_are_no_more_go_and_the_others_stay(self) -> None:
        directory = Path(self.mktemp())
        for name in (TOKEN, "f" * 32, "template-x"):
            (directory / name).mkdir(parents=True)
            (directory / name / "qmp").write_text("")
        remove_other_sockets(directory, {TOKEN})
        self.assertEqual([path.name for path in directory.iterdir()], [TOKEN])

    def test_a_directory_that_can_not_be_made_is_named_with_its_setting(self) -> None:
        root = Path(self.mktemp())
        paths = ProviderPaths(root / "state", root / "run")
        for _ in range(2):
            host_checks.make_directories(paths, root / "templates")
        for made in (paths.state, paths.run, paths.vms, root / "templates"):
            self.assertEqual(made.stat().st_mode & 0o777, 0o700)
        (root / "file").write_text("")
        with self.assertRaisesRegex(FailedPrecondition, "file/x can't be made: .*state_dir"):
            host_checks.make_directories(paths, root / "file" / "x")

    def test_templates_are_where_the_configuration_says_or_beside_the_vms(self) -> None:
        paths = ProviderPaths(Path("/state"), Path("/run/x"))
        for configured, where in ((None, Path("/state/templates")), (Path("/fast"), Path("/fast"))):
            self.assertEqual(paths.templates(configured), where)
            self.assertEqual(paths.kvm(configured), where / "kvm.json")

    def test_what_a_start_waits_for_that_has_no_guest_image(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        missing = NoGuestImage("there is no guest image: make one")

        def why() -> Unavailable:
            return host_checks.without_image(directory, missing)

        self.assertEqual(str(why()), str(missing))
        with self.assertRaises(Unavailable), reporting.reported(directory, lambda words: None) as tell:
            tell("installing Debian")
            self.assertIsInstance(why(), Awaited)
            self.assertIn("which is being built: installing Debian", str(why()))
            raise Unavailable("no mirror answers")
        self.assertNotIsInstance(why(), Awaited)
        self.assertIn(f"{missing}; the last build was not completed: no mirror answers", str(why()))

    def test_a_user_that_is_not_there_is_named_with_the_way_to_make_it(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            qemu_user("no-such-user")
        self.assertIn("useradd --system", str(caught.exception))

    def test_a_program_that_is_not_installed_yet_is_waited_for_and_its_package_named(self) -> None:
        self.patch(host_checks, "_PROGRAMS", {"no-such-program": "its-package"})
        self.patch(os, "geteuid", lambda: 0)
        with self.assertRaises(Unavailable) as caught:
            host_checks.check_rights()
        self.assertIn("apt-get install its-package", str(caught.exception))

    def test_one_daemon_at_a_time(self) -> None:
        clock, paths = Clock(), ProviderPaths(Path(self.mktemp()), Path(self.mktemp()))
        paths.state.mkdir()
        held = self.successResultOf(start(host_checks.take_lock(clock, paths)))
        refused, soon = (start(host_checks.take_lock(clock, paths)) for _ in range(2))
        clock.pump([0.25] * 12)
        self.assertNoResult(soon)
        refused.cancel()
        self.failureResultOf(refused, CancelledError)
        os.close(held)
        clock.advance(0.25)
        held = self.successResultOf(soon)
        refused = start(host_checks.take_lock(clock, paths))
        clock.pump([0.25] * 24)
        self.failureResultOf(refused, FailedPrecondition)
        os.close(held)

    def test_the_subnet_of_update_runtime_config_outlives_the_daemon_but_not_the_configuration(self) -> None:
        path = Path(self.mktemp()) / "network.json"
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))
        save_subnet(path, "10.1.0.0/16", IPv4Network("10.2.0.0/24"))
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.2.0.0/24"))
        self.assertEqual(load_subnet(path, "10.3.0.0/16"), IPv4Network("10.3.0.0/16"))
        path.write_text("[")
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))

    def test_the_saved_subnet_is_the_daemons_alone_and_a_firewall_goes_twice_as_once(
        self,
    ) -> None:
        path = Path(self.mktemp()) / "network.json"
        save_subnet(path, "10.1.0.0/16", IPv4Network("10.2.0.0/24"))
        self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
        for firewall in (CLOSED, None, None):
            save_firewall(path.parent, firewall)
            self.assertEqual((path.parent / "firewall.json").exists(), firewall is not None)

    def test_a_full_disk_is_told_as_one(self) -> None:
        error = as_infranetes_error(OSError(28, "No space left on device", "/x/disk.qcow2"))
        self.assertIsInstance(error, ResourceExhausted)
        self.assertIn("/x/disk.qcow2", str(error))
