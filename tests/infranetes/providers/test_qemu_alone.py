# SPDX-License-Identifier: Apache-2.0
"""QEMU's VMs are isolated from each other: users of their own, and memory that no other VM can write to."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pwd
import signal
import subprocess
import tempfile
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu import ram, uids
from infranetes.providers.qemu.command_line import CommandLine
from infranetes.providers.qemu.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.record import VmRecord, VmRecords
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.sizes import disk_size
from infranetes.providers.qemu.uids import UidRange
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError, InvalidArgument, ResourceExhausted
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root
from tests.support.waiting import until

reactor = installed()
RANGE = UidRange(1_900_020_000, 1_900_020_031)  # not what a daemon here uses
NOT_ONES_OWN = UidRange(0, 15)  # system accounts that exist on every node
MIB = 1 << 20


class UserTests(TestCase):
    """Users for VMs."""

    async def sleeping(self, uid: int) -> subprocess.Popen[bytes]:
        """Start a process of that user."""
        command = unprivileged(["sleep", "600"], QemuUser(uid, uid), dies_with_parent=True)
        process = subprocess.Popen(command[1:])  # without setsid: setpriv becomes the command

        def end() -> None:
            process.kill()
            process.wait()

        self.addCleanup(end)
        await until(lambda: uid in {owner for owner, _ in uids._processes()}, "it runs")
        return process

    def test_the_next_one_is_chosen_and_the_first_follows_the_last(self) -> None:
        first = uids.next_free(RANGE, (), None)
        self.assertIn(first, RANGE)
        self.assertEqual(uids.next_free(RANGE, (), RANGE.first), RANGE.first + 1)
        self.assertEqual(uids.next_free(RANGE, (), RANGE.last), RANGE.first)
        self.assertEqual(
            uids.next_free(RANGE, {RANGE.first + 1, RANGE.first + 2}, RANGE.first), RANGE.first + 3
        )

    def test_daemons_begin_apart(self) -> None:
        self.assertGreater(len({uids.next_free(RANGE, (), None) for _ in range(20)}), 3)

    def test_all_taken(self) -> None:
        with self.assertRaises(ResourceExhausted) as caught:
            uids.next_free(RANGE, range(RANGE.first, RANGE.last + 1), None)
        self.assertIn("providers.qemu.uids", str(caught.exception))

    def test_whoever_has_an_account_is_left_out(self) -> None:
        pwd.getpwuid(NOT_ONES_OWN.first)
        accounts = {entry.pw_uid for entry in pwd.getpwall()}
        free = UidRange(NOT_ONES_OWN.first, 5000)
        self.assertNotIn(uids.next_free(free, (), 4999), accounts)
        self.assertGreater(uids.next_free(free, (), 5000), 1)

    @needs_root
    async def test_whoever_has_a_process_is_left_out_until_it_is_ended(self) -> None:
        wanted = RANGE.first + 5
        process = await self.sleeping(wanted)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted + 1)
        for _ in range(2):
            uids.kill_processes(wanted)
        self.assertEqual(process.wait(10), -signal.SIGKILL)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted)

    def test_root_has_no_vm_whose_processes_could_be_ended(self) -> None:
        signalled: list[int] = []
        self.patch(os, "kill", lambda pid, signal: signalled.append(pid))
        for uid in (0, -1):
            self.assertRaises(InvalidArgument, uids.kill_processes, uid)
        self.assertEqual(signalled, [])

    @needs_root
    def test_whoever_has_a_file_where_all_may_write_is_left_out(self) -> None:
        wanted = RANGE.first + 9
        with tempfile.NamedTemporaryFile() as file:
            os.chown(file.name, wanted, wanted)
            self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted + 1)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted)

    def test_ranges_that_can_not_be(self) -> None:
        self.assertEqual(uids.parse("1900000000-1900009999"), UidRange(1900000000, 1900009999))
        for words in (
            "",
            "5",
            "a-b",
            "0-99",
            "10-20",
            "99-10",
            "65000-66000",
            "1-99999999999",
            "4294967200-4294967295",
        ):
            self.assertRaises(InvalidArgument, uids.parse, words)
            with self.assertRaises(ConfigError) as caught:
                structure({"uids": words}, QemuSettings, source="x", prefix="providers.qemu")
            self.assertIn("providers.qemu.uids", str(caught.exception))

    @needs_root
    def test_a_vms_files_are_its_users_alone_and_the_record_says_whose(self) -> None:
        overlay = Path(self.mktemp())
        overlay.write_bytes(b"disk")
        records = VmRecords(Path(self.mktemp()))
        records.open()
        made = VmRecord("ab" * 16, "sandbox", "c", "n", "10.7.0.2", 1.0, RANGE.first)
        records.add(made, overlay)
        self.assertEqual(records.read(), [made])
        directory = records.directory_of(made.token)
        for name, owner in (("disk.qcow2", RANGE.first), ("console.log", RANGE.first), ("vm.json", 0)):
            status = (directory / name).stat()
            self.assertEqual((status.st_uid, status.st_gid), (owner, owner), name)
        self.assertEqual((directory / "disk.qcow2").stat().st_mode & 0o777, 0o600)
        self.assertEqual(directory.stat().st_mode & 0o777, 0o700)

    def test_records_of_an_earlier_version_are_read(self) -> None:
        records = VmRecords(Path(self.mktemp()))
        records.open()
        made = VmRecord("ab" * 16, "sandbox", "c", "n", "10.7.0.2", 1.0)
        fields = {**attrs.asdict(made), "phase": "ready"}
        del fields["uid"]
        records.directory_of(made.token).mkdir()
        (records.directory_of(made.token) / "vm.json").write_text(json.dumps(fields))
        self.assertEqual([each.uid for each in records.read()], [0])


class RamTests(TestCase):
    """The template's memory."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        with self.path.open("wb") as file:
            file.truncate(8 * MIB)
            for offset in (0, 3 * MIB + 4096, 8 * MIB - 1):
                file.seek(offset)
                file.write(b"x")
            file.seek(5 * MIB)
            file.write(bytes(MIB))

    def memory(self) -> int:
        descriptor = ram.load(self.path)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def test_it_is_the_same_and_zeros_take_no_memory(self) -> None:
        memory = self.memory()
        self.assertEqual(os.pread(memory, 9 * MIB, 0), self.path.read_bytes())
        self.assertLessEqual(os.fstat(memory).st_blocks * 512, 3 * 65536)

    def test_nobody_writes_to_it_by_whatever_way(self) -> None:
        memory = self.memory()
        again = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)  # QEMU opens it like this
        self.addCleanup(os.close, again)
        for descriptor in (memory, again):
            self.assertRaises(PermissionError, os.pwrite, descriptor, b"y", 0)
            self.assertRaises(PermissionError, os.ftruncate, descriptor, 0)
            self.assertRaises(PermissionError, os.ftruncate, descriptor, 9 * MIB)
            self.assertRaises(PermissionError, mmap.mmap, descriptor, MIB, mmap.MAP_SHARED)
            self.assertRaises(PermissionError, fcntl.fcntl, descriptor, fcntl.F_ADD_SEALS, 0)
            self.assertRaises(PermissionError, os.posix_fallocate, descriptor, 0, 9 * MIB)
        with mmap.mmap(again, MIB, mmap.MAP_PRIVATE) as private:
            private[:4] = b"mine"
        self.assertEqual(os.pread(memory, 4, 0), b"x\0\0\0")

    async def test_it_is_loaded_once_for_all_until_the_file_is_another(self) -> None:
        shared = ram.SharedRam(reactor)
        self.addCleanup(lambda: Deferred.fromCoroutine(shared.close()))
        inodes = []
        for _ in range(2):
            descriptor = await shared.of(self.path)
            inodes.append(os.fstat(descriptor).st_ino)
            os.close(descriptor)
        self.assertEqual(len(set(inodes)), 1)
        other = self.path.with_name("other")
        other.write_bytes(b"other")
        other.replace(self.path)
        descriptor = await shared.of(self.path)
        self.assertEqual(os.pread(descriptor, 9, 0), b"other")
        os.close(descriptor)

    async def test_a_file_that_is_not_there(self) -> None:
        shared = ram.SharedRam(reactor)
        with self.assertRaises(FileNotFoundError):
            await shared.of(self.path.with_name("none"))

    def test_of_one_that_can_not_be_loaded_no_memory_is_kept(self) -> None:
        def held() -> list[str]:
            links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
            return [os.readlink(each) for each in links if os.path.exists(each)]

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(ram, "_copy", full)
        self.assertRaises(OSError, ram.load, self.path)
        self.assertRaises(FileNotFoundError, ram.load, self.path.with_name("none"))
        self.assertEqual([each for each in held() if ram.NAME in each or each == str(self.path)], [])


class DiskTests(TestCase):
    """How large a VM's disk is."""

    def test_between_the_templates_and_the_most(self) -> None:
        command_line = CommandLine("qemu", "1", "tcg", 512, 1024, 1, disk_mib=8 << 10)
        most = 40 << 30
        self.assertEqual(disk_size(command_line, 0, most), 8 << 30)
        for wanted in (8 << 30, 20 << 30, most):
            self.assertEqual(disk_size(command_line, wanted, most), wanted)
        for wanted in (1, (8 << 30) - 1, most + 1):
            error = self.assertRaises(InvalidArgument, disk_size, command_line, wanted, most)
            for word in ("infranetes.io/disk", "8192Mi", "40960Mi", "max_disk"):
                self.assertIn(word, str(error))

    def test_another_size_is_another_template(self) -> None:
        command_line = CommandLine("qemu", "1", "tcg", 512, 1024, 1)
        self.assertNotEqual(
            command_line.template_inputs("k"), attrs.evolve(command_line, disk_mib=1).template_inputs("k")
        )
