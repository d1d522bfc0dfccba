# SPDX-License-Identifier: Apache-2.0
"""Files as block devices of the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.loop_devices import (
    LoopDevice,
    is_loop_device,
    loop_devices_of,
    new_loop_device,
    open_loop_device,
)
from tests.harness.needs import needs_mounts
from tests.support.loop_devices import end_loop_device, left_of

_ADD, _REMOVE = 0x4C80, 0x4C81  # of linux/loop.h


@needs_mounts
class LoopDeviceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()
        self.file.write_bytes(b"content".ljust(4096, b"\0"))
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        for path in self.all():
            end_loop_device(path)

    def all(self) -> list[str]:
        return loop_devices_of(str(self.file))

    @contextmanager
    def made(self) -> Iterator[LoopDevice]:
        backing = os.open(self.file, os.O_RDONLY)
        try:
            with new_loop_device(backing) as device:
                yield device
        finally:
            os.close(backing)

    def test_it_holds_the_file_and_ends_with_its_last_user(self) -> None:
        with self.made() as device:
            self.assertEqual(device.read(7), b"content")
            self.assertEqual(device.backing_file(), str(self.file))
            self.assertEqual(self.all(), [device.path])
            self.assertTrue(is_loop_device(os.stat(device.path)))
            with self.assertRaises(OSError) as caught, open(device.path, "r+b", buffering=0) as file:
                file.write(b"x")
            self.assertIn(caught.exception.errno, (errno.EPERM, errno.EACCES, errno.EROFS))
        self.assertEqual(left_of(self.all), [])

    def test_one_that_is_kept_stays_until_it_is_ended(self) -> None:
        with self.made() as device:
            device.keep()
            device.keep()
        self.assertEqual(self.all(), [device.path])
        with open_loop_device(device.path) as again:
            again.end()
            again.end()
        self.assertEqual(left_of(self.all), [])

    def test_one_without_a_file_has_ended(self) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR)
        self.addCleanup(os.close, control)
        # Not one that has just ended: another test may have it by now, as the kernel gives out the lowest
        number = fcntl.ioctl(control, _ADD, 4000 + os.getpid() % 4000)
        self.addCleanup(fcntl.ioctl, control, _REMOVE, number)
        with open_loop_device(f"/dev/loop{number}") as device:
            self.assertEqual(device.backing_file(), "")
            device.end()

    def test_one_that_somebody_else_has_open_ends_with_them(self) -> None:
        with self.made() as device:
            device.keep()
        with open_loop_device(device.path) as other:
            with open_loop_device(device.path) as again:
                again.end()
            self.assertEqual(other.read(7), b"content")
        self.assertEqual(left_of(self.all), [])

    def test_one_that_is_taken_meanwhile_is_left_to_whoever_has_it(self) -> None:
        with self.made() as first, self.made() as second:
            self.assertNotEqual(first.path, second.path)
            self.assertEqual(sorted(self.all()), sorted([first.path, second.path]))

    def test_one_that_is_just_ending_is_left_alone(self) -> None:
        """The kernel refuses to open it, with ENXIO."""
        opened, ending = os.open, list[str]()

        def opening(path: str | Path, flags: int) -> int:
            if str(path).startswith("/dev/loop") and str(path) != "/dev/loop-control" and not ending:
                ending.append(str(path))
                raise OSError(errno.ENXIO, "No such device or address", str(path))
            return opened(path, flags)

        self.patch(os, "open", opening)
        with self.made() as device:
            self.assertEqual(len(ending), 1)
            ending.clear()
            with self.assertRaises(FileNotFoundError), open_loop_device(device.path):
                self.fail("it is open")

    def test_one_that_ends_while_it_is_looked_at_is_none_of_the_files(self) -> None:
        with self.made() as device:
            self.assertEqual(self.all(), [device.path])
            for number in (errno.ENODEV, errno.ENOENT):
                failing = OSError(number, os.strerror(number))
                patched = self.patch(Path, "read_text", Mock(side_effect=failing))
                self.assertEqual((self.all(), device.backing_file()), ([], ""))
                patched.restore()
            self.patch(Path, "read_text", Mock(side_effect=OSError(errno.EIO, "broken")))
            self.assertRaises(OSError, self.all)

    def test_other_files_are_no_loop_devices(self) -> None:
        for path in ("/dev/null", str(self.file), "/"):
            self.assertFalse(is_loop_device(os.stat(path)))
