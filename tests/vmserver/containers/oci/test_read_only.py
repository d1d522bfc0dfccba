# SPDX-License-Identifier: Apache-2.0
"""crun runs from a read-only mount; with an emulated processor, programs have fixed addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import needs_mounts
from vmserver.containers.oci import addresses, read_only
from vmserver.containers.oci.read_only import thd_read_only
from vmserver.machine.mounts import Flag, mount, mounts_below, unmount


@needs_mounts
class ReadOnlyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="infranetes-crun-"))
        self.addCleanup(shutil.rmtree, self.base)
        self.addCleanup(self._unmount)
        self.at = self.base / "run" / "bin" / "crun"
        self.program = self._program("crun", "first")

    def _unmount(self) -> None:
        for one in reversed(mounts_below(self.base)):
            unmount(one.point)

    def _program(self, name: str, says: str) -> Path:
        path = self.base / name
        path.write_text(f"#!/bin/sh\necho {says}\n")
        path.chmod(0o755)
        return path

    def _said(self, program: str) -> str:
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()

    def test_it_is_run_from_a_mount_that_nobody_can_write_to(self) -> None:
        for _ in range(2):
            self.assertEqual(thd_read_only(str(self.program), self.at), str(self.at))
        self.assertEqual(self._said(str(self.at)), "first")
        self.assertEqual([one.point for one in mounts_below(self.base)], [str(self.at)])
        self.assertRaises(OSError, self.at.write_text, "other")
        self.assertEqual(self.at.parent.stat().st_mode & 0o777, 0o700)
        self.assertTrue(os.statvfs(self.at).f_flag & os.ST_RDONLY)

    def test_a_program_that_was_replaced_is_mounted_anew(self) -> None:
        thd_read_only(str(self.program), self.at)
        self._program("newer", "second").rename(self.program)
        thd_read_only(str(self.program), self.at)
        self.assertEqual(self._said(str(self.at)), "second")
        self.assertEqual(len(mounts_below(self.base)), 1)

    def test_without_a_mount_it_is_run_from_where_it_is(self) -> None:
        (self.base / "run").write_text("no directory")
        self.assertEqual(thd_read_only(str(self.program), self.at), str(self.program))
        self.assertEqual(thd_read_only(str(self.base / "none"), self.base / "at"), str(self.base / "none"))
        self.assertEqual(mounts_below(self.base), [])

    def test_where_it_can_not_be_made_read_only_no_mount_is_left(self) -> None:
        """On a writable mount crun would be less protected than without one."""
        done = list[Flag]()

        def once(source: str, target: str, kind: str, flags: Flag) -> None:
            if done:
                raise FailedPrecondition("the kernel does not remount")
            done.append(flags)
            mount(source, target, kind, flags)

        self.patch(read_only, "mount", once)
        self.assertEqual(thd_read_only(str(self.program), self.at), str(self.program))
        self.assertEqual((len(done), mounts_below(self.base)), (1, []))

    def test_its_mount_opens_no_devices(self) -> None:
        thd_read_only(str(self.program), self.at)
        self.assertTrue(os.statvfs(self.at).f_flag & os.ST_NODEV)


class AddressesTests(SynchronousTestCase):
    def _said(self, processor: str | None) -> list[str]:
        """Return the personality of programs that start with fixed addresses, and of those after them."""
        cpuinfo = Path(self.mktemp())
        if processor is not None:
            cpuinfo.write_bytes(os.fsencode(f"processor\t: 0\nmodel name\t: {processor}\n"))
        self.patch(addresses, "_CPUINFO", cpuinfo)
        addresses.emulated.cache_clear()
        self.addCleanup(addresses.emulated.cache_clear)
        with addresses.fixed_addresses():
            meanwhile = self._personality()
        return [meanwhile, self._personality()]

    def _personality(self) -> str:
        command = ["cat", "/proc/self/personality"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def test_where_the_processor_is_emulated_a_program_has_the_same_addresses(self) -> None:
        self.assertEqual(self._said("QEMU TCG CPU version 2.5+"), ["00040000", "00000000"])

    def test_a_name_in_any_encoding_is_no_trouble(self) -> None:
        self.assertEqual(self._said("caf\udce9"), ["00000000", "00000000"])

    def test_elsewhere_they_are_random(self) -> None:
        self.assertEqual(self._said("AMD EPYC"), ["00000000", "00000000"])

    def test_where_it_is_not_said_they_are_random(self) -> None:
        self.assertEqual(self._said(None), ["00000000", "00000000"])
        self.assertIs(addresses.emulated(), False)
