# SPDX-License-Identifier: Apache-2.0
"""Consoles of destroyed QEMU VMs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.interface import Instance, InstanceState, ProviderContext, Size
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.vm import consoles
from infranetes.providers.qemu.vm.consoles import ConsoleArchive
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord, VmRecords
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root


def record(number: int, sandbox: str = "") -> VmRecord:
    token = f"{number:032x}"
    return VmRecord(token, sandbox or f"sandbox{number}", "c", "n", "10.7.0.2", 12.5, detail="why")


class ArchiveTests(SynchronousTestCase):
    """The consoles of the VMs that were destroyed last."""

    def setUp(self) -> None:
        self.vm = Path(self.mktemp())
        self.vm.mkdir()
        (self.vm / "console.log").write_bytes(b"\x1b[2Jbooting\r\n" + b"x" * 5000 + b"\nKernel panic\x07\n")
        (self.vm / "qemu.log").write_text("qemu: terminating\n")
        self.directory = Path(self.mktemp())
        self.archive = ConsoleArchive(self.directory, 3, 1000)

    def keep(self, number: int) -> None:
        self.archive.add(record(number), self.vm)
        path = self.directory / f"{number:032x}.json"
        os.utime(path, (number, number))

    def test_what_is_kept_is_found_bounded_and_printable(self) -> None:
        self.keep(1)
        [found] = self.archive.find("sandbox1")
        self.assertEqual(
            (found.instance_id, found.detail, found.output), (f"qemu-{1:032x}", "why", "qemu: terminating")
        )
        self.assertTrue(found.text.endswith("x\nKernel panic"))
        self.assertLessEqual(len(found.text), 1000)
        self.assertGreater(found.ended_at, 0)
        self.assertEqual((self.directory / f"{1:032x}.json").stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.archive.find("other"), [])

    def test_no_more_than_so_many_and_the_newest_first(self) -> None:
        for number in range(1, 7):
            self.keep(number)
        self.assertEqual(
            [one.sandbox_id for one in self.archive.find("")], ["sandbox6", "sandbox5", "sandbox4"]
        )
        ConsoleArchive(self.directory, 0, 1000).add(record(9), self.vm)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_what_a_killed_daemon_left_half_written_goes_with_the_next(self) -> None:
        self.keep(1)
        (self.directory / "x.json.new").write_text("{")
        (self.directory / "ab.json").write_text("{")
        self.keep(2)
        self.assertEqual(len(self.archive.find("sandbox")), 2)
        self.assertFalse((self.directory / "x.json.new").exists())

    def test_that_of_a_machine_that_is_there(self) -> None:
        found = consoles.read(record(1), self.vm, 100)
        self.assertEqual((found.ended_at, found.text[-5:]), (0.0, "panic"))
        nothing = consoles.read(record(1), self.vm / "none", 100)
        self.assertEqual((nothing.text, nothing.output), ("", ""))


@needs_root
class UnstartedTests(TestCase):
    """A provider that can't start, as without a guest image."""

    async def test_it_shows_the_consoles_on_disk(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        paths = ProviderPaths(root / "state" / "qemu", root / "run" / "qemu")
        context = ProviderContext(root / "state", root / "run", "c", "n")
        provider = QemuProvider(installed(), QemuSettings(image_dir=root / "none"), context)
        self.assertEqual(await provider.consoles(""), [])
        records, gone = VmRecords(paths.vms), root / "gone"
        records.open()
        for each in (record(1), attrs.evolve(record(3), node="other")):
            (root / "overlay").write_text("")
            records.add(each, root / "overlay")
        (paths.vms / record(1).token / "console.log").write_text("still there")
        gone.mkdir()
        (gone / "console.log").write_text("Kernel panic")
        ConsoleArchive(paths.consoles, 3, 1000).add(record(2), gone)
        found = await provider.consoles("sandbox")
        self.assertEqual([each.text for each in found], ["still there", "Kernel panic"])

    async def test_the_newest_of_those_that_are_there_is_first(self) -> None:
        provider, records = self.unstarted()
        for number, created in ((1, 20.0), (2, 30.0), (3, 10.0)):
            made = attrs.evolve(record(number), created_at=created)
            overlay = Path(self.mktemp())
            overlay.write_text("")
            records.add(made, overlay)
        found = await provider.consoles("sandbox")
        self.assertEqual([each.sandbox_id for each in found], ["sandbox2", "sandbox1", "sandbox3"])

    async def test_it_changes_no_vm_and_one_of_another_provider_is_destroyed_already(self) -> None:
        provider, _ = self.unstarted()
        id = record(1).id
        works: list[Callable[[], Deferred[Any]]] = [
            lambda: provider.resize(id, Size(1000)),
            lambda: provider.place(id, "/kubepods/pod1", Size()),
            lambda: provider.pin(id, "0", ""),
        ]
        for asked in works:
            with self.assertRaises(Unavailable) as caught:
                await asked()
            self.assertIn("is not started", str(caught.exception))
        for other in ("i-0123", "", id.upper()):
            await provider.destroy(other)

    def unstarted(self) -> tuple[QemuProvider, VmRecords]:
        root = Path(self.mktemp())
        root.mkdir()
        context = ProviderContext(root / "state", root / "run", "c", "n")
        records = VmRecords(ProviderPaths(root / "state" / "qemu", root / "run" / "qemu").vms)
        records.open()
        return QemuProvider(installed(), QemuSettings(image_dir=root / "none"), context), records


class FoundTests(SynchronousTestCase):
    """A VM whose process has ended before a daemon starts."""

    def found(self, **fields: Any) -> Instance:
        paths = ProviderPaths(Path(self.mktemp()), Path(self.mktemp()))
        made = attrs.evolve(record(1), phase=Phase.READY, **fields)
        vm_paths = paths.of_vm(made, QemuUser(0, 0))
        vm_paths.directory.mkdir(parents=True)
        vm_paths.console.write_text("booting\nKernel panic - not syncing\n")
        vm = Vm(made, vm_paths)
        for _ in range(2):
            vm.explain_missing_process()
        return vm.instance()

    def test_its_last_output_is_told(self) -> None:
        instance = self.found(detail="")
        self.assertIs(instance.state, InstanceState.ENDED)
        self.assertEqual(
            instance.detail,
            "its process was gone when the daemon started; last output: Kernel panic - not syncing",
        )

    def test_what_an_earlier_daemon_knew_stays(self) -> None:
        self.assertEqual(
            self.found(detail="its process was killed by SIGKILL").detail, "its process was killed by SIGKILL"
        )


class FileTests(SynchronousTestCase):
    """The file of a console, which QEMU appends to."""

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
